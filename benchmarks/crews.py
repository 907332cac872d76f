"""Fewer workers early in training: what a crew that grows costs in accuracy, and what it saves.

Every strategy trains for the same epochs on all workers from the beginning, and with a crew that grows to as
many, at one learning rate, which suits all workers together. Accuracies are means of the last evaluations.
Network and gradients take their time, as in `shoal compare --sim`. Virtual time, so the figures are the same
on every machine with the same torch.

    python benchmarks/crews.py [--task mnist] [--crew 2@0,4@300,8@600] [--epochs 3] [--seeds 0,1,2]
        [--strategies sync,bmuf,asgd] [--lr RATE] [--jobs 1] [--json FILE]

SHOAL_DATA in the environment names the folder that holds mnist/ with its four files. `--json` writes the runs
of the first seed as `shoal compare --json` does; `python docs/crews.py FILE docs/crews.svg` draws them.

The last line is JSON: for each strategy its points of test accuracy ahead of the full crew, and its bytes,
seconds and worker-seconds as a share of the full crew's; means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal.cli.compare import COMPUTE, NETWORK
from shoal.core.crew_sizes import CrewSizes
from shoal.report import write_json
from shoal.report.crews import worker_seconds

RATES = {"sync": 0.34, "asgd": 0.03}
"""Learning rates for eight workers on MNIST: the task's own, 0.12, times their square root for an average of
eight gradients; a quarter of it for eight gradients that are added up. Others train at the task's own."""

Run = tuple[int, str, str]
"""Seed, strategy and crew."""


def train(run: Run, task: str, epochs: int, lr: float | None) -> dict[str, Any]:
    """The record of one run."""
    seed, word, crew = run
    torch.set_num_threads(1)
    sizes = CrewSizes.parse(crew)
    grows = {"crew": sizes} if len(sizes.at) > 1 else {"workers": sizes.largest}
    return shoal.run(
        task,
        word,
        epochs=epochs,
        seed=seed,
        lr=RATES.get(word) if lr is None else lr,
        transport="sim",
        network=NETWORK,
        compute=COMPUTE,
        **grows,
    ).record()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--crew", default="2@0,4@300,8@600", help="as for shoal compare")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", default="0,1,2", help="numbers separated by commas")
    parser.add_argument("--strategies", default="sync,bmuf,asgd", help="words separated by commas")
    parser.add_argument("--lr", type=float, help="learning rate of all strategies")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", help="write the runs of the first seed to this file")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    words, crew = options.strategies.split(","), str(CrewSizes.parse(options.crew))
    full = f"{CrewSizes.parse(crew).largest}@0"
    runs = [(seed, word, sizes) for seed in seeds for word in words for sizes in (full, crew)]
    one = partial(train, task=options.task, epochs=options.epochs, lr=options.lr)
    found: dict[Run, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) if options.jobs > 1 else None
    for run, record in zip(runs, (pool.map if pool else map)(one, runs), strict=True):
        print(*run, accuracy(record), record["bytes_sent"], file=sys.stderr, flush=True)
        found[run] = record
    if options.json:
        write_json([found[run] for run in runs if run[0] == seeds[0]], options.json)

    table = Table(title=f"{options.task}, {options.epochs} epochs, seeds {options.seeds}")
    for name in ("strategy", "lr", "workers"):
        table.add_column(name)
    for name in ("test accuracy, %", "MB sent", "virtual s", "worker-seconds", "steps"):
        table.add_column(name, justify="right")
    ratios: dict[str, float] = {}
    for word in words:
        for sizes in (full, crew):
            records = [found[seed, word, sizes] for seed in seeds]
            table.add_row(word, f"{records[0]['config']['lr']:g}", sizes, *figures(records))
        pairs = [(found[seed, word, crew], found[seed, word, full]) for seed in seeds]
        ratios |= {f"{word}_{name}": ratio for name, ratio in against(pairs).items()}
    Console(width=120).print(table)
    print(json.dumps(ratios))


def accuracy(record: dict[str, Any]) -> float:
    """The mean of the last evaluations."""
    return float(record["final"]["test_accuracy"]["mean"])


def figures(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """One row: means over the seeds, the accuracy with its standard deviation."""
    ends = [accuracy(record) for record in records]
    spread = f" ± {stdev(ends):.2f}" if len(ends) > 1 else ""
    steps = [max(node["steps"] for node in record["nodes"]) for record in records]
    return (
        f"{fmean(ends):.2f}{spread}",
        f"{fmean(record['bytes_sent'] for record in records) / 1e6:,.0f}",
        f"{fmean(record['seconds'] for record in records):.1f}",
        f"{fmean(worker_seconds(record) for record in records):.1f}",
        f"{fmean(steps):.0f}",
    )


def against(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """How the crew that grows compares with the full one."""
    return {
        "points": round(fmean(accuracy(mine) - accuracy(full) for mine, full in pairs), 3),
        "bytes": round(fmean(mine["bytes_sent"] / full["bytes_sent"] for mine, full in pairs), 3),
        "seconds": round(fmean(mine["seconds"] / full["seconds"] for mine, full in pairs), 3),
        "worker_seconds": round(
            fmean(worker_seconds(mine) / worker_seconds(full) for mine, full in pairs), 3
        ),
    }


if __name__ == "__main__":
    main()
