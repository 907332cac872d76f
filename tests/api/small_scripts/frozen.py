"""A frozen backbone, and a pruned head that is trained; the optimizer holds the parameters of both."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
model[0].requires_grad_(False)
prune.random_unstructured(model[2], "weight", amount=0.5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
say("backbone_before", *model[0].parameters())
before = F.cross_entropy(model(x), y)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(x, y), 32 // training.workers)
for _ in range(3):
    for inputs, classes in shoal.shard(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
training.finish()
say("weights", *model.parameters())
say("backbone", *model[0].parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(model(x), y).detach())}")
prune.remove(model[2], "weight")
print(f"pruned {int((model[2].weight == 0).sum())}")
