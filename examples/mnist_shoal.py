"""MNIST on many workers: shoal run -n 4 --strategy bmuf examples/mnist_shoal.py"""

import argparse
import gzip
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


def idx(path: Path, offset: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(gzip.open(path).read()), dtype=torch.uint8)[offset:]


def mnist(folder: Path, part: str) -> TensorDataset:
    x = idx(folder / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 784).float() / 255
    return TensorDataset((x - 0.1307) / 0.3081, idx(folder / f"{part}-labels-idx1-ubyte.gz", 8).long())


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path(os.environ.get("SHOAL_DATA", ".")) / "mnist")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loader = DataLoader(mnist(args.data, "train"), batch_size=64, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

for _ in shoal.epochs(args.epochs, model, optimizer):
    for x, y in shoal.shard(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()

x, y = mnist(args.data, "t10k").tensors
accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
print(f"test accuracy {100 * accuracy:.2f} %")
