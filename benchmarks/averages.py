"""What an average among the processes of this host costs, by each collective.

    python benchmarks/averages.py [--workers 2,4] [--mib 8] [--collectives mapped,stripes,rabenseifner]
        [--transport processes] [--times 60] [--rounds 3]

In every round all collectives take their turn, with processes of their own and one thread each. For each
number of workers: milliseconds of processor time (the mean) and of the clock (the median) for one average at
worker 0; of several rounds the median. On a busy machine only the processor time means something. The last
line is JSON: "workers/collective" -> milliseconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

import shoal
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

WARM_UP = 10
"""Averages that do not count: memory is allocated and mapped in the first ones."""


@dataclass(frozen=True)
class Averages(Strategy):
    """Averages a vector as long as the model, again and again; worker 0 writes what that took to `file`."""

    sends = Sends.DIFFERENCES
    times: int = 60
    file: str = ""

    async def worker(self, w: Node) -> None:
        async for t in w.steps():
            v, figures = w.x.clone(), []
            for _ in range(WARM_UP + self.times if t == 0 else 0):
                began, used = time.perf_counter(), time.process_time()
                await w.mean(v, weight=1.0)
                figures.append((time.process_time() - used, time.perf_counter() - began))
            if w.rank == 0 and t == 0:
                Path(self.file).write_text(json.dumps(figures[WARM_UP:]))
            w.descend(await w.mean(w.grad()))


def noise() -> shoal.Data:
    """A sample for each of many workers."""
    x, y = torch.randn(64, 1024), torch.zeros(64, dtype=torch.long)
    return shoal.Data(x, y, x[:1], y[:1])


def measure(options: argparse.Namespace, workers: int, collective: str) -> tuple[float, float]:
    """Milliseconds of one average: of processor time, and of the clock."""
    model = partial(nn.Linear, 1024, round(options.mib * 256), bias=False)
    task = shoal.Task("averages", model, noise, batch=1, lr=1e-6)
    settings = {"workers": workers, "epochs": 1, "tests": 0, "threads": 1, "transport": options.transport}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        shoal.run(task, Averages(times=options.times, file=str(file)), collective=collective, **settings)
        cpu, clock = zip(*json.loads(file.read_text()), strict=True)
    return 1e3 * sum(cpu) / len(cpu), 1e3 * median(clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--mib", type=float, default=8.0, help="of the vector")
    parser.add_argument("--collectives", default="mapped,stripes,rabenseifner")
    parser.add_argument("--transport", default="processes")
    parser.add_argument("--times", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = {}
    for workers in map(int, options.workers.split(",")):
        found: dict[str, list[tuple[float, float]]] = {word: [] for word in options.collectives.split(",")}
        for _ in range(options.rounds):
            for word, figures in found.items():
                figures.append(measure(options, workers, word))
        for word, figures in found.items():
            cpu, clock = (median(column) for column in zip(*figures, strict=True))
            print(f"{workers} workers, {word}: {cpu:.2f} ms of processor time, {clock:.2f} ms", flush=True)
            result[f"{workers}/{word}"] = round(cpu, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
