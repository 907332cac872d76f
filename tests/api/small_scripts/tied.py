"""A language model whose output layer is its embedding."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import say, words

import shoal


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.decode = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.decode.weight = self.embed.weight

    def forward(self, word):
        return self.decode(torch.tanh(self.mix(self.embed(word))))


torch.manual_seed(0)
now, following = words()
model = Language()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
before = F.cross_entropy(model(now), following)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(now, following), 32 // training.workers)
for _ in range(3):
    for word, after in shoal.shard(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(word), after).backward()
        optimizer.step()
training.finish()
say("weights", *model.parameters())
tied = model.decode.weight is model.embed.weight and model.decode(torch.eye(8)).equal(
    model.embed.weight.T + model.decode.bias
)
print(f"tied {tied}")
print(f"loss {float(before.detach())} {float(F.cross_entropy(model(now), following).detach())}")
