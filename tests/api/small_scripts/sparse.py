"""Embeddings with sparse gradients, and the optimizer that is named."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import say, words

import shoal

MAKE = {
    "sgd": lambda held: torch.optim.SGD(held, lr=0.5),
    "adagrad": lambda held: torch.optim.Adagrad(held, lr=0.3),
    "sparse_adam": lambda held: torch.optim.SparseAdam(held, lr=0.1),
}
word = sys.argv[1] if len(sys.argv) > 1 else "adagrad"
torch.manual_seed(0)
now, following = words()
embed, decode = nn.Embedding(12, 8, sparse="dense" not in sys.argv), nn.Linear(8, 12)
model = nn.Sequential(embed, decode)
if word == "sparse_adam":
    decode.requires_grad_(False)
optimizer = MAKE[word]([p for p in model.parameters() if p.requires_grad])
before = F.cross_entropy(model(now), following)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(now, following), 32 // training.workers)
for _ in range(4):
    for inputs, outputs in shoal.shard(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), outputs).backward()
        optimizer.step()
training.finish()
say("weights", *model.parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(model(now), following).detach())}")
