"""The script that two_hosts.py runs on its hosts: MNIST for a number of steps; prints the test accuracy."""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.task import Data, Task
from shoal.programs.tasks.images import mlp, mnist_data
from shoal.runs.evaluation import evaluate

BATCH = 64
LR = 0.1


def part(samples: int) -> Data:
    """The first samples of MNIST."""
    data = mnist_data()
    return Data(data.x[:samples], data.y[:samples], data.test_x, data.test_y)


def task(samples: int) -> Task:
    """The same for a simulation."""
    return Task(name="mnist", model=mlp, data=lambda: part(samples), lr=LR, batch=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True, help="of all workers together")
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    model, data = mlp(), part(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=BATCH, shuffle=True)
    training = shoal.attach(model, optimizer)
    for x, y in shoal.shard(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    training.finish()
    if training.rank == 0:
        print(f"accuracy {evaluate(model, task(samples), data).accuracy:.2f}")


if __name__ == "__main__":
    main()
