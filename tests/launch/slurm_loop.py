"""A training script for jobs of a cluster: says where it begins, and with what model it ends."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--until", type=Path, help="go on until this file is there, slowly")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer)
begin = training.resumed_from or 0
print(f"worker {training.rank} begins at {begin}", flush=True)

for step in range(begin, args.steps):
    draw = torch.Generator().manual_seed(1000 * step + training.rank)
    x, y = torch.randn(8, 8, generator=draw), torch.randint(3, (8,), generator=draw)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if args.until is not None:
        if step % 20 == 0:
            print(f"worker {training.rank} is at {step}", flush=True)
        if step % 100 == 99 and args.until.exists():  # for all workers at the same step
            break
        time.sleep(0.02)

training.finish()
total = float(sum(p.sum().item() for p in model.parameters()))
print(f"worker {training.rank} of {training.workers} has {total!r}", flush=True)
