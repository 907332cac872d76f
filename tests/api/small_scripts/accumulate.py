"""Gradients of four small batches for each step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.03)
before = F.cross_entropy(model(x), y)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(x, y), 8 // training.workers)
for _ in range(4):
    for number, (inputs, classes) in enumerate(shoal.shard(loader), start=1):
        (F.cross_entropy(model(inputs), classes) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
training.finish()
say("weights", *model.parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(model(x), y).detach())}")
