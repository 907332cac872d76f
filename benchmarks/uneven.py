"""Throughput with one slow worker, with --balance and without.

Real processes on this machine. The loss function sleeps for a fixed time per sample, several times as long on
one worker, in place of a slower device; sleeping needs no core, so a machine with few cores can have many
workers. The ideal throughput is the sum of the workers' speeds.

    python benchmarks/uneven.py [--runs sync,sync+balance,adpsgd] [--workers 4] [--factor 5] [--json FILE]

The last line is JSON: for each run, its samples a second as a share of that ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES

RUNS = "sync,sync+balance,bmuf+balance,diloco+balance,sgp,gossip,adpsgd"
BALANCED = "+balance"
PERIOD = 8  # of strategies that have one; the runs are short


@dataclass(frozen=True)
class SlowLoss:
    """Cross-entropy that sleeps for every sample, `factor` times as long in the first process to call it."""

    folder: str
    seconds: float
    factor: float

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # not in evaluation
            time.sleep(len(labels) * self.seconds * (self.factor if self._is_slow() else 1.0))
        return F.cross_entropy(outputs, labels)

    def _is_slow(self) -> bool:
        """Whether this process is the slow one: the first that wrote its id to the folder."""
        place = Path(self.folder) / "slow"
        with suppress(FileExistsError):
            place.symlink_to(str(os.getpid()))
        return place.readlink() == Path(str(os.getpid()))


def measure(name: str, options: argparse.Namespace) -> shoal.Result:
    """One run, such as "sync" or "sync+balance"."""
    word = name.removesuffix(BALANCED)
    settings = {"period": str(PERIOD)} if "period" in STRATEGIES.options(word) else {}
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        loss = SlowLoss(folder, options.ms / 1000, options.factor)
        return shoal.run(
            replace(TASKS.make(options.task), loss=loss),
            STRATEGIES.make(word, **settings),
            workers=options.workers,
            epochs=options.epochs,
            threads=1,
            balance=name.endswith(BALANCED),
        )


def show(results: dict[str, shoal.Result], ideal: float, options: argparse.Namespace) -> None:
    table = Table(
        title=f"{options.task}, {options.workers} workers, one of them {options.factor:g} times slower",
        caption=f"{options.ms:g} ms a sample; together the workers could do {ideal:,.0f} samples a second. "
        f"The machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
    )
    table.add_column("run")
    for column in ("seconds", "samples/s", "of ideal", "test acc. %", "waiting", "samples of the workers"):
        table.add_column(column, justify="right")
    for name, r in results.items():
        samples = sorted((node["samples"] for node in r.nodes if node["role"] == "worker"), reverse=True)
        table.add_row(
            name,
            f"{r.seconds:.1f}",
            f"{r.samples_per_second:,.0f}",
            f"{r.samples_per_second / ideal:.0%}",
            f"{r.test_accuracy or 0:.2f}",
            f"{r.wait_fraction:.0%}",
            " ".join(f"{number:,}" for number in samples),
        )
    Console(width=max(Console().width, 110)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", default=RUNS, help="strategies, with +balance behind the word or without")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--factor", type=float, default=5.0, help="how many times slower one worker is")
    parser.add_argument("--ms", type=float, default=4.0, help="of computing a sample, at the others")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    ideal = (options.workers - 1 + 1 / options.factor) / (options.ms / 1000)
    results: dict[str, shoal.Result] = {}
    for name in options.runs.split(","):
        results[name] = measure(name, options)
        print(f"{name}: {results[name].samples_per_second:,.0f} samples/s", flush=True)
    show(results, ideal, options)
    if options.json:
        options.json.write_text(
            json.dumps({name: r.record() for name, r in results.items()}, indent=2) + "\n"
        )
    print(json.dumps({name: round(r.samples_per_second / ideal, 4) for name, r in results.items()}))


if __name__ == "__main__":
    main()
