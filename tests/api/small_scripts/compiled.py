"""A model that is compiled before attach()."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
model = torch.compile(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), backend=backend)
optimizer = torch.optim.RAdam(model.parameters(), lr=0.05)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(x, y), 32 // training.workers)
losses = []
for _ in range(4):
    for inputs, classes in shoal.shard(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
training.finish()
say("weights", *model.parameters())
print(f"loss {losses[0]} {losses[-1]}")
