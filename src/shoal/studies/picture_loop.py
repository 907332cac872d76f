"""A script as a user has it, for plans: a convolutional network on pictures. Computes much, sends little."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


def main() -> None:
    """Train for some epochs; the first worker prints how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    generator = torch.Generator().manual_seed(0)
    pictures, classes = torch.randn(4096, 1, 16, 16, generator=generator), torch.arange(4096) % 10
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(pictures, classes), batch_size=32, shuffle=True)
    training = shoal.attach(model, optimizer)
    began = time.perf_counter()
    for _ in range(epochs):
        for x, y in shoal.shard(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    training.finish()
    if training.rank == 0:
        print(f"took {time.perf_counter() - began:.4f} s")


if __name__ == "__main__":
    main()
