"""A Trainer of transformers: python huggingface_trainer.py FOLDER '{"batch": 16, "model": "classifier"}'"""

import json
import sys

import torch
from samples import show
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

folder, wanted = sys.argv[1], json.loads(sys.argv[2])
SMALL = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2}


class Words(Dataset):
    """Sentences with a class each, or with a number of words to predict that differs from one to the next."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(5, 50, (90, 12), generator=generator)
        self.lengths = torch.randint(3, 12, (90,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if wanted.get("model") == "language":
            labels = torch.where(torch.arange(12) < self.lengths[index], x, -100)
        else:
            labels = x[0] % 3
        return {"input_ids": x, "labels": labels}


def network():
    torch.manual_seed(1)
    if wanted.get("model") == "language":
        sizes = {"vocab_size": 50, "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 3}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, **sizes, **dropout))


arguments = TrainingArguments(
    folder,
    per_device_train_batch_size=wanted["batch"],
    num_train_epochs=wanted.get("epochs", 2),
    max_grad_norm=0.0,
    use_cpu=True,
    report_to=[],
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    disable_tqdm=True,
    **{"train_sampling_strategy": "sequential", "learning_rate": 1e-2, **wanted.get("arguments", {})},
)
model, data = network(), Words()
options = {"train_dataset": data, "eval_dataset": data}
if wanted.get("strategy") is None:
    trainer = Trainer(model, arguments, **options)
else:
    from shoal.integrations.huggingface import ShoalTrainer

    trainer = ShoalTrainer(model, arguments, strategy=wanted["strategy"], **options)
trainer.train(resume_from_checkpoint=wanted.get("resume"))
show("weights", model)
evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
print("evals", json.dumps(evals))
print("steps", trainer.state.global_step, "best", trainer.state.best_model_checkpoint, flush=True)
