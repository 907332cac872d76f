"""Mixed precision: bfloat16 inside, a gradient scaler, clipping."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
before = F.cross_entropy(model(x), y)
training = shoal.attach(model, optimizer)
loader = DataLoader(TensorDataset(x, y), 32 // training.workers)
for _ in range(3):
    for inputs, classes in shoal.shard(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), classes)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
training.finish()
say("weights", *model.parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(model(x), y).detach())}")
