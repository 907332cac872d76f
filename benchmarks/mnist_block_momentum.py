"""The effect of block momentum: MNIST on one worker, and by model averaging and BMUF on many workers.

An MLP 784-256-256-10 sees every image equally often in each run. One worker takes all the steps; averaging N
models takes N times fewer steps of the same length, and BMUF makes up for that with block momentum. Virtual
time, so the figures are the same on every machine with the same torch.

    python benchmarks/mnist_block_momentum.py [--epochs 4] [--workers 8] [--period 8] [--seeds 0,1,2]

SHOAL_DATA in the environment names the folder that holds mnist/ with its four files.

The last line is JSON: test accuracy in per cent of single, local and bmuf, each the mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal import BMUF, Local, Single, Strategy, Task
from shoal.programs.tasks import TASKS


def accuracy(task: Task, strategy: Strategy, workers: int, epochs: int, seed: int) -> float:
    """Test accuracy in per cent, after the last step."""
    result = shoal.run(task, strategy, workers=workers, epochs=epochs, seed=seed, transport="sim")
    assert result.test_accuracy is not None
    return result.test_accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4, help="sweeps over the training images")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--period", type=int, default=8, help="local steps in a block")
    parser.add_argument("--seeds", default="0", help="numbers separated by commas")
    parser.add_argument("--lr", type=float, help="learning rate of all sides, instead of the task's own")
    parser.add_argument("--task", default="mnist", help="another task, such as digits, for a quick look")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    task = TASKS.make(options.task)
    if options.lr is not None:
        task = replace(task, lr=options.lr)
    sides: dict[str, tuple[Strategy, int]] = {
        "single": (Single(), 1),
        "local": (Local(period=options.period), options.workers),
        "bmuf": (BMUF(period=options.period), options.workers),
    }
    measured = {
        name: [accuracy(task, strategy, workers, options.epochs, seed) for seed in seeds]
        for name, (strategy, workers) in sides.items()
    }

    table = Table(
        title=f"{task.name}, lr {task.lr:g}, batch {task.batch}, {options.epochs} epochs: test accuracy, %",
        caption=task.about,
    )
    table.add_column("strategy")
    table.add_column("workers", justify="right")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean", justify="right")
    for name, (_, workers) in sides.items():
        row = [f"{value:.2f}" for value in [*measured[name], mean(measured[name])]]
        table.add_row(f"{name}, period {options.period}" if name != "single" else name, str(workers), *row)
    Console().print(table)

    if options.json:
        options.json.write_text(json.dumps({"seeds": seeds, **measured}, indent=2) + "\n")
    print(json.dumps({name: round(mean(values), 3) for name, values in measured.items()}))


if __name__ == "__main__":
    main()
