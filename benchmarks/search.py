"""Do the methods of search beat random search? Equal budgets in samples, several seeds, mean and spread.

Hyper-parameters (learning rate, batch, momentum): random search, successive halving, population-based
training, particle swarm. Architectures: random ones against ageing evolution, random cells against
hierarchical evolution. Every search maximises minus the loss on examples held out of the training set; the
test set is used once, for the model that the search returns. One trial at a time, so that a seed gives the
same figures on every machine with the same torch.

    python benchmarks/search.py [--task digits] [--epochs 160] [--seeds 0,1,2,3,4] [--jobs 1]
        [--groups values,layers,cells] [--samples 10000]

`--task mnist` trains on the first `--samples` examples; SHOAL_DATA names the folder that holds mnist/.

The last line is JSON: for each method how much lower its held-out loss is than that of random search with
the same number of samples, in percent of the latter, the mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.table import Table

from shoal.core.task import Data, Task
from shoal.programs.tasks import TASKS
from shoal.search import run

VALUES = {"lr": "log 1e-3..3.0", "batch": [16, 32, 64, 128], "momentum": (0.0, 0.99)}
LAYERS = {"architecture": "layers:most=4"}
CELLS = {"architecture": "cells:motifs=3,motif_nodes=3,cell_nodes=4,mutations=200,channels=8"}

GROUPS = {  # the first of a group is what the others are measured against
    "values": (
        VALUES,
        {
            "random": "random:length={short}",
            "random, as long as pbt": "random:length={each}",
            "asha": "asha:first=1,longest=16,reduction=4",
            "pbt": "pbt:population=8",
            "pso": "pso:particles=8,length={short}",
        },
    ),
    "layers": (
        LAYERS,
        {
            "random layers": "random:length={tiny}",
            "evolution": "evolution:population=10,sample=5,length={tiny}",
        },
    ),
    "cells": (
        CELLS,
        {
            "random cells": "random:length={short}",
            "hierarchical": "hierarchical:population=10,tournament=0.3,length={short}",
        },
    ),
}


@dataclass(frozen=True)
class Figure:
    """What one search found."""

    held_out_loss: float
    test_loss: float
    test_accuracy: float
    samples: int


def shortened(data: Data, samples: int) -> Data:
    return replace(data, x=data.x[:samples].clone(), y=data.y[:samples].clone())


def short_data(word: str, samples: int) -> Data:
    return shortened(TASKS.make(word).data(), samples)


def make_task(word: str, samples: int) -> Task:
    task = TASKS.make(word)
    return task if word == "digits" else replace(task, data=partial(short_data, word, samples))


def search(job: tuple[int, str, str], task: Task, epochs: int) -> Figure:
    seed, group, name = job
    space, methods = GROUPS[group]
    lengths = {"each": epochs // 8, "short": max(1, epochs // 32), "tiny": max(1, epochs // 80)}
    method = methods[name].format(**lengths)
    found = run(task, space, method, epochs=epochs, seed=seed, metric="loss", at_once=1, threads=1)
    assert found.test_loss is not None and found.test_accuracy is not None
    return Figure(-found.best["score"], found.test_loss, found.test_accuracy, found.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="digits", choices=["digits", "mnist"])
    parser.add_argument("--epochs", type=int, default=160, help="budget of every search")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="numbers separated by commas")
    parser.add_argument("--groups", default="values,layers", help="of values, layers, cells")
    parser.add_argument("--samples", type=int, default=10000, help="training examples of mnist")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, groups = [int(seed) for seed in options.seeds.split(",")], options.groups.split(",")
    jobs = [(seed, group, name) for group in groups for seed in seeds for name in GROUPS[group][1]]
    one = partial(search, task=make_task(options.task, options.samples), epochs=options.epochs)
    found: dict[tuple[int, str, str], Figure] = {}
    with ThreadPoolExecutor(options.jobs) as pool:  # each only waits for a process of its own
        for job, figure in zip(jobs, pool.map(one, jobs), strict=True):
            print(*job, figure, file=sys.stderr, flush=True)
            found[job] = figure
    gains: dict[str, float] = {}
    for group in groups:
        table, ahead = tell(group, seeds, found)
        table.title = f"{options.task}, {options.epochs} epochs a search, {len(seeds)} seeds, {group}"
        Console(width=130).print(table)
        gains |= ahead
    print(json.dumps(gains))


def tell(
    group: str, seeds: Sequence[int], found: dict[tuple[int, str, str], Figure]
) -> tuple[Table, dict[str, float]]:
    """The table of a group, and how far each method is ahead of its first."""
    names = list(GROUPS[group][1])
    table = Table()
    for column in ("method", "samples", "held-out loss", "test loss", "test accuracy, %", "ahead of random"):
        table.add_column(column, justify="left" if column == "method" else "right")
    gains: dict[str, float] = {}
    for name in names:
        mine = [found[seed, group, name] for seed in seeds]
        base = [found[seed, group, names[0]] for seed in seeds]
        ahead = [
            100 * (1 - own.held_out_loss / other.held_out_loss) for own, other in zip(mine, base, strict=True)
        ]
        wins = sum(value > 0 for value in ahead)
        told = f"{fmean(ahead):+.1f} %, {wins} of {len(seeds)} seeds" if name != names[0] else ""
        if name != names[0]:
            gains[name] = round(fmean(ahead), 2)
        table.add_row(
            name,
            f"{mine[0].samples:,}",
            spread([figure.held_out_loss for figure in mine], 4),
            spread([figure.test_loss for figure in mine], 4),
            spread([figure.test_accuracy for figure in mine], 2),
            told,
        )
    return table, gains


def spread(values: Sequence[float], digits: int) -> str:
    """The mean and the standard deviation."""
    return f"{fmean(values):.{digits}f} ± {stdev(values) if len(values) > 1 else 0.0:.{digits}f}"


if __name__ == "__main__":
    main()
