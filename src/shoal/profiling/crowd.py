"""One of several processes that train at the same time: python -m shoal.profiling.crowd RANK FOLDER SIZES.

With SIZES 1,2,4 there are four of them. First the first one trains alone, then two, then all four, and again
from the start; each trains a small net on one thread. Rank 0 prints one line of JSON: the seconds of its step
for each size.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from shoal.launch.control import leave_with_parent
from shoal.profiling.probe import meet

SECONDS, ROUNDS = 0.3, 3
"""How long each crowd trains, and how often: where a machine's speed changes, it does for all sizes."""

WIDTH, BATCH = 512, 64


def train(seconds: float) -> float:
    """Seconds of a step."""
    model = nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    steps, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Train in each crowd that this process is one of."""
    leave_with_parent()
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    sizes = [int(size) for size in sys.argv[3].split(",")]
    train(0.2)  # to warm up
    steps: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(ROUNDS):
        for size in sizes:
            meet(folder, f"before-{turn}-{size}", rank, sizes[-1])
            if rank < size:
                steps[size].append(train(SECONDS))
    if rank == 0:
        print(json.dumps([median(steps[size]) for size in sizes]), flush=True)


if __name__ == "__main__":
    main()
