"""A training loop for runs on several hosts: prints its process id, and at the end its weights."""

import argparse
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in every step")
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer)
print(f"pid {os.getpid()} resumed from {training.resumed_from}")
losses = []
for _ in range(args.epochs):
    for batch, labels in shoal.shard(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 3:
            print("trains")
        time.sleep(args.pause)
training.finish()
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
print(f"weights {flat.numpy().tobytes().hex()}")
print(f"fell {sum(losses[-4:]) < sum(losses[:4])}")
