"""A loop over shoal.epochs(), or over range() between attach() and finish(); prints its final weights."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.launch.environment import Place

parser = argparse.ArgumentParser()
parser.add_argument("--attach", action="store_true", help="attach and finish, instead of epochs()")
parser.add_argument("--stop-after", type=int, default=-1, help="steps, after which the process vanishes")
parser.add_argument("--break-at", type=int, nargs=2, default=(-1, -1), help="worker, epoch")
args = parser.parse_args()

draw = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(96, 8, generator=draw), torch.randint(3, (96,), generator=draw))
train, validation = DataLoader(data, 8, shuffle=True), DataLoader(data, 16)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
if args.attach:
    training = shoal.attach(model, optimizer)

steps = 0
for epoch in range(3) if args.attach else shoal.epochs(3, model, optimizer):
    if args.break_at == [Place.find().rank, epoch]:
        break
    for x, y in shoal.shard(train):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
        if steps == args.stop_after:
            os._exit(9)
    model.eval()
    with torch.no_grad():
        for x, _ in shoal.shard(validation):  # another loader, whose batches are not those of training
            model(x)
    model.train()
    schedule.step()

if args.attach:
    training.finish()
print(f"steps {steps}")
print("weights " + torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes().hex())
