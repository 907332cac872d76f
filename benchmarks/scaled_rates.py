"""What `scale_lr="auto"` is worth: every strategy with its defaults against one worker after the same epochs.

Accuracies are means of the last evaluations, and network and gradients take their time, as in `shoal compare
--sim`. Virtual time, so the figures are the same on every machine with the same torch.

    python benchmarks/scaled_rates.py [--task mnist] [--workers 4] [--epochs 5] [--seeds 0,1,2]
        [--strategies WORDS] [--scale-lr auto] [--jobs 1]

SHOAL_DATA in the environment names the folder that holds mnist/ with its four files.

The last line is JSON: for each strategy the points of test accuracy ahead of one worker, the mean over the
seeds; null if a run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal.cli.compare import COMPUTE, NETWORK
from shoal.core.errors import ShoalError
from shoal.strategies import STRATEGIES

WAIT_FOR_ALL = {
    *("sync", "local", "post_local", "bmuf", "slowmo", "diloco", "streaming_diloco"),
    *("sync_server", "hierarchical"),
}
"""Strategies whose workers all wait for each other: at most 0.7 points below one worker is the aim."""


@dataclass(frozen=True)
class Figure:
    """How one run ended."""

    accuracy: float
    lr: float


def train(run: tuple[int, str], task: str, workers: int, epochs: int, scale_lr: str) -> Figure | str:
    """The end of one run, or the sentence of its failure."""
    seed, word = run
    torch.set_num_threads(1)
    count = 1 if word == "single" else workers
    try:
        result = shoal.run(
            task,
            word,
            workers=count,
            epochs=epochs,
            seed=seed,
            scale_lr=scale_lr,
            transport="sim",
            network=NETWORK,
            compute=COMPUTE,
        )
    except ShoalError as error:
        return str(error)
    return Figure(result.final["test_accuracy"]["mean"], result.config["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", default="0,1,2", help="numbers separated by commas")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="words separated by commas")
    parser.add_argument("--scale-lr", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    words = list(dict.fromkeys(["single", *options.strategies.split(",")]))
    runs = [(seed, word) for seed in seeds for word in words]
    one = partial(
        train,
        task=options.task,
        workers=options.workers,
        epochs=options.epochs,
        scale_lr=options.scale_lr,
    )
    found: dict[tuple[int, str], Figure | str] = {}
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) if options.jobs > 1 else None
    for run, figure in zip(runs, (pool.map if pool else map)(one, runs), strict=True):
        print(*run, figure, file=sys.stderr, flush=True)
        found[run] = figure

    table = Table(
        title=f"{options.task}, {options.workers} workers, {options.epochs} epochs, "
        f"scale_lr {options.scale_lr}: test accuracy, %"
    )
    for name in ("strategy", "lr", *(f"seed {seed}" for seed in seeds), "against one worker", "aim"):
        table.add_column(name, justify="left" if name in ("strategy", "aim") else "right")
    points: dict[str, float | None] = {}
    for word in words:
        figures = [found[seed, word] for seed in seeds]
        ahead = [
            mine.accuracy - theirs.accuracy
            for seed in seeds
            if isinstance(mine := found[seed, word], Figure)
            and isinstance(theirs := found[seed, "single"], Figure)
        ]
        points[word] = round(fmean(ahead), 3) if len(ahead) == len(seeds) else None
        rates = {f"{figure.lr:.3g}" for figure in figures if isinstance(figure, Figure)}
        told = [f"{figure.accuracy:.2f}" if isinstance(figure, Figure) else "failed" for figure in figures]
        table.add_row(word, " ".join(rates), *told, *_judged(word, points[word]))
    Console(width=120).print(table)
    print(json.dumps(points))


def _judged(word: str, ahead: float | None) -> tuple[str, str]:
    """The points against one worker, and whether the aim is met."""
    if word == "single":
        return "", ""
    least = -0.7 if word in WAIT_FOR_ALL else -1.5
    met = ahead is not None and ahead >= least
    return "failed" if ahead is None else f"{ahead:+.2f}", f"{least:+.1f} {'met' if met else 'missed'}"


if __name__ == "__main__":
    main()
