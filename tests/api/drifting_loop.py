"""A loop that does something at worker 1 alone, see `--what`; prints its final weights."""

import argparse
import copy

import torch
from torch import nn

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--what", default="")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--more", type=int, default=0, help="steps that worker 1 takes beyond the others'")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
training = shoal.attach(model, optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
is_odd = training.rank == 1
draw = torch.Generator().manual_seed(training.rank)
at_first = copy.deepcopy(optimizer.state_dict())

for step in range(args.steps + args.more * is_odd):
    if step == 20 and is_odd:
        if args.what == "rate":  # as ReduceLROnPlateau on its own loss
            optimizer.param_groups[0]["lr"] *= 0.1
        if args.what == "state":
            optimizer.load_state_dict(at_first)
        if args.what == "batch":
            schedule.step()
            continue
    x = torch.randn(8, 4, generator=draw)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    schedule.step()

training.finish()
print("weights " + torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes().hex())
