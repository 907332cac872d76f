"""Accuracy with and without kills, in virtual time: the same runs, in which workers die and come back.

Every strategy trains on the simulator, with each seed twice: undisturbed, and with a kill of one worker every
`--every` seconds of virtual time on average, all over the run. A killed worker is noticed after 0.1 s and
started again after 2 s. Gradients take `--compute` seconds, with a jitter of a tenth, over 1 Gbit/s.

    python benchmarks/virtual_storm.py [--task mnist] [--strategies sync,bmuf:period=8] [--workers 8]
        [--every 20] [--epochs 3] [--batch BATCH] [--lr RATE] [--compute 1] [--seeds 3] [--jobs 1]

kills        of all seeds
lost         samples that should be in the model and are not
accuracy, loss  on the test set: mean over the seeds, lowest and highest; without kills, then with

The last line is JSON: the same figures for each strategy, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal.core.catalogue import split_list
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES

NOTICED, RESTARTED = 0.1, 2.0
"""Seconds after a kill."""


def storm(workers: int, every: float, seconds: float, seed: int) -> shoal.Faults:
    """Kills of workers drawn from the seed, in a run that takes about so many seconds."""
    dice, moment = random.Random(seed), 0.0
    faults = shoal.Faults(noticed_after=NOTICED, restart_after=RESTARTED)
    while (moment := moment + dice.expovariate(1 / every)) < seconds:
        faults = faults.kill(dice.randrange(workers), moment)
    return faults


def train(word: str, options: argparse.Namespace, seed: int, faults: shoal.Faults | None) -> shoal.Result:
    """One run in virtual time."""
    return shoal.run(
        options.task,
        STRATEGIES.read(word),
        workers=options.workers,
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        seed=seed,
        transport="sim",
        network=shoal.Network.parse("1Gbit,100us"),
        compute=shoal.Compute(mean=options.compute, jitter=0.1),
        faults=faults,
        tests=0,
    )


def train_twice(word: str, options: argparse.Namespace, seed: int) -> tuple[shoal.Result, shoal.Result, int]:
    """A run without kills and one with, and how many there were."""
    plain = train(word, options, seed, None)
    faults = storm(options.workers, options.every, plain.seconds, seed)
    return plain, train(word, options, seed, faults), len(faults.kills)


def measure(word: str, options: argparse.Namespace, samples: int) -> dict[str, Any]:
    """The figures of one strategy: lists of two, without kills and with."""
    pair = partial(train_twice, word, options)
    if options.jobs == 1:
        pairs = [*map(pair, range(options.seeds))]
    else:
        one_thread = partial(torch.set_num_threads, 1)
        with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=one_thread) as pool:
            pairs = [*pool.map(pair, range(options.seeds))]
    plain_runs, stormy, kills = zip(*pairs, strict=True)
    return {
        "kills": sum(kills),
        "samples_lost": [options.epochs * samples - result.samples for result in stormy],
        "seconds": [[result.seconds for result in results] for results in (plain_runs, stormy)],
        "accuracy": [[result.test_accuracy for result in results] for results in (plain_runs, stormy)],
        "loss": [[result.test_loss for result in results] for results in (plain_runs, stormy)],
    }


def _figure(values: list[float], digits: int) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def show(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    title = f"{options.task}, {options.workers} workers, a kill every {options.every:g} virtual seconds"
    table = Table(title=title)
    for name in ("strategy", "kills", "lost", "accuracy", "with kills", "loss", "with kills"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for word, row in figures.items():
        accuracies = [_figure(values, 2) for values in row["accuracy"]]
        losses = [_figure(values, 4) for values in row["loss"]]
        table.add_row(word, str(row["kills"]), str(sum(row["samples_lost"])), *accuracies, *losses)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--strategies", default="sync,bmuf:period=8", help="words, separated by commas")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=float, default=20.0, help="virtual seconds between two kills")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, help="by default the task's")
    parser.add_argument("--lr", type=float, help="learning rate; by default the task's")
    parser.add_argument("--compute", type=float, default=1.0, help="virtual seconds of a gradient")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds that train at the same time")
    options = parser.parse_args()
    words, samples = split_list(options.strategies), len(TASKS.make(options.task).data().x)
    for word in words:
        STRATEGIES.read(word)  # before minutes of measuring
    figures = {word: measure(word, options, samples) for word in words}
    show(figures, options)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
