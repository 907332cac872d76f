"""A loop of a user's own, run by the tests as a script; prints first and final weights, to the last bit."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.seeds import stream

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--strategy-in-code", default=None)
parser.add_argument("--raise-at", type=int, nargs=2, default=(-1, -1))
parser.add_argument("--leave-at", type=int, nargs=2, default=(-1, -1))
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--last-layer", action="store_true", help="train it alone, from a start of its own")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(os.getpid() if args.last_layer else 0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(args.device)


def weights() -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    return flat.numpy().tobytes().hex()


start = weights()
trained = model[2] if args.last_layer else model
optimizer = torch.optim.SGD(trained.parameters(), lr=args.rate, momentum=args.momentum)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)

if args.ddp:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    net = nn.parallel.DistributedDataParallel(model)
else:
    training = shoal.attach(model, optimizer, args.strategy_in_code)
    rank, net = training.rank, model

for step in range(args.steps):
    if args.raise_at == [rank, step]:
        raise RuntimeError("the cat walked over the keyboard")
    if args.leave_at == [rank, step]:
        os._exit(7)
    draw = stream(step, "batch", rank)
    x, y = torch.randn(8, 8, generator=draw), torch.randint(3, (8,), generator=draw)
    x, y = x.to(args.device), y.to(args.device)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    schedule.step()

if args.ddp:
    torch.distributed.destroy_process_group()
else:
    training.finish()
if "LOCAL_RANK" in os.environ and rank > 0:
    raise SystemExit  # torchrun mixes the lines of its processes
print(f"start {start}")
print(f"weights {weights()}")
