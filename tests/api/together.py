"""A loop whose workers have other speeds and batches; prints what they hold in the end, and on the way."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--buffers", default="mean")
parser.add_argument("--same-batches", action="store_true")
parser.add_argument("--look", type=int, default=-1, help="rank of the worker that looks at the common model")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
training = shoal.attach(model, optimizer, buffers=args.buffers)
torch.manual_seed(0 if args.same_batches else training.rank)


def say(word: str, tensors) -> None:
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    print(f"{word} {flat.numpy().tobytes().hex()}")


for step in range(args.steps + 3 * training.rank):
    time.sleep(0.002 * (1 + training.rank))
    x, y = torch.randn(8, 4) + (0 if args.same_batches else training.rank), torch.randint(3, (8,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if training.rank == args.look and step == args.steps // 2:
        say("before", model.parameters())
        with training.common_model():
            say("common", model.parameters())
        say("after", model.parameters())
say("own", model[1].buffers())
training.finish()
say("weights", model.parameters())
say("buffers", model[1].buffers())
