"""A user's own loop that is longer at each worker than at the one before; prints the final weights."""

import argparse
import os
import signal

import torch
from torch import nn

import shoal
from shoal.core.seeds import stream

parser = argparse.ArgumentParser()
parser.add_argument("--die", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with shoal.attach(model, optimizer) as training:
    for step in range(10 + 7 * training.rank):
        if [training.rank, step] == args.die:
            os.kill(os.getpid(), signal.SIGKILL)
        draw = stream(step, "batch", training.rank)
        x, y = torch.randn(8, 8, generator=draw), torch.randint(3, (8,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
print(f"weights {flat.numpy().tobytes().hex()}")
