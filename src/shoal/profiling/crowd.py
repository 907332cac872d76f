"""One of several processes that train at the same time, `-m shoal.profiling.crowd RANK FOLDER SIZES SECONDS`.

With SIZES 1,2,4 there are four of them. First the first one trains alone, then two, then all four; each
trains a small net on one thread, for SECONDS. Rank 0 prints one line of JSON: the seconds of its step for
each size.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import quantiles

import torch
from torch import nn

from shoal.launch.control import leave_with_parent
from shoal.profiling.probe import meet

WIDTH, BATCH = 512, 64


def train(seconds: float) -> float:
    """Processor seconds of a step, their lower quartile: other programs are no part of the crowd."""
    model = nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.thread_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        taken.append(time.thread_time() - began)
    return quantiles(taken, n=4)[0]


def main() -> None:
    """Train in each crowd that this process is one of."""
    leave_with_parent()
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    sizes, seconds = [int(size) for size in sys.argv[3].split(",")], float(sys.argv[4])
    train(0.2)  # to warm up
    steps = []
    for size in sizes:
        meet(folder, f"before-{size}", rank, sizes[-1])
        if rank < size:
            steps.append(train(seconds))
    if rank == 0:
        print(json.dumps(steps), flush=True)


if __name__ == "__main__":
    main()
