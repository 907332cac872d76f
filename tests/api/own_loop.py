"""Another loop of a user's own, with all that a real one has: dropout, a frozen layer, a buffer, two loaders.

Prints what the tests compare. `--stop-after N` leaves the script after N steps, as a crash would.
"""

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
parser.add_argument("--stop-after", type=int, default=-1)
parser.add_argument("--late", default="")
args = parser.parse_args()

torch.manual_seed(int(time.time_ns()) % 1000)  # every process starts elsewhere


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("shift", torch.randn(1))
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(self.frozen(x) + self.shift)


draw = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(96, 8, generator=draw), torch.randint(3, (96,), generator=draw))
model = Model()
if os.environ.get("SAME_START"):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=draw) / 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
training = shoal.attach(model, optimizer)
if training.resumed_from is None:
    torch.manual_seed(training.rank)  # a resumed run goes on where its random stream was
batches, validation = shoal.shard(DataLoader(data, 8, shuffle=True)), shoal.shard(DataLoader(data, 16))
steps = training.resumed_from or 0

for _ in range(args.epochs):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
        if steps == args.stop_after:
            os._exit(9)
    model.eval()
    with torch.no_grad():
        for x, _y in validation:
            model(x)
    model.train()
    schedule.step()

training.finish()
if args.late == "raise" and training.rank == 0:
    raise RuntimeError("saving failed")
if args.late == "work":
    time.sleep(4)
everything = [*(p.detach() for p in model.parameters()), *model.buffers()]
print(f"steps {steps}")
print("weights " + torch.cat([t.reshape(-1) for t in everything]).numpy().tobytes().hex())
