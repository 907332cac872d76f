"""A classifier with transformers. `diff` this and words_huggingface_shoal.py: that is the tutorial."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Words(Dataset):
    """Made up: the first word of eight says which of three classes a sentence belongs to."""

    def __init__(self, sentences, seed):
        self.words = torch.randint(1, 100, (sentences, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "labels": words[0] % 3}


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(axis=1) == predicted.label_ids).mean()}


torch.manual_seed(0)
sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 8}
config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
model = BertForSequenceClassification(config)  # random weights: nothing is downloaded
arguments = TrainingArguments(
    "words_huggingface",
    per_device_train_batch_size=16,
    num_train_epochs=5,
    learning_rate=5e-3,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Words(1600, seed=0),
    eval_dataset=Words(300, seed=1),
    compute_metrics=accuracy,
)
trainer.train()
print(f"test accuracy {100 * trainer.evaluate()['eval_accuracy']:.2f} %")
