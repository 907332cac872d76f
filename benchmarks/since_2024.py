"""Loss and traffic of the methods since 2024 beside `diloco` and `sync`, on a small language model.

All take the same samples in virtual time: eight workers, 16 sequences of 64 characters of Shakespeare a
worker and step. Rates and outer settings are those in METHODS; none was tuned on many runs.

    python benchmarks/since_2024.py [--steps 1220] [--workers 8] [--seeds 0,1,2] [--only "diloco;sync"]
        [--network 100Mbit,20ms] [--compute 20ms] [--jobs 1] [--svg FILE] [--json FILE]

`--steps 40 --seeds 0` shows in a minute that everything runs; `--jobs 16` makes so many runs at a time.
SHOAL_DATA in the environment names the folder that holds tinyshakespeare/. The last line is JSON: for each
method the mean loss, the bytes sent and the virtual seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log10
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import shoal
from shoal.core.task import Data, Task
from shoal.programs.tasks.shakespeare import shakespeare, shakespeare_data
from shoal.report.style import CSS
from shoal.strategies import STRATEGIES


@dataclass(frozen=True)
class Method:
    """A strategy with its options, a codec, and the learning rate of the optimizer."""

    strategy: str
    options: dict[str, Any]
    lr: float = 0.003
    codec: str | None = None
    decays: bool = True  # whether AdamW decays weights: a strategy that steps by itself refuses that


METHODS = {
    "sync": Method("sync", {}),
    "diloco": Method("diloco", {"period": 15, "momentum": 0.5}),
    "diloco, e3m0": Method("diloco", {"period": 15, "momentum": 0.5}, codec="e3m0"),
    "streaming_diloco": Method("streaming_diloco", {"period": 16, "momentum": 0.5, "overlap": 2}),
    "muloco": Method("muloco", {"period": 15, "momentum": 0.5}, lr=0.01),
    "sparse_loco": Method("sparse_loco", {"period": 15}),
    "sparse_loco, signmag": Method("sparse_loco", {"period": 15, "values": "signmag"}),
    "demo": Method("demo", {}, lr=0.001, decays=False),
    "async_diloco": Method("async_diloco", {"period": 15, "momentum": 0.5}),
    "decoupled_diloco": Method("decoupled_diloco", {"period": 16, "momentum": 0.5, "overlap": 2}),
    "halos": Method("halos", {"period": 15, "exchange": 4, "local_buffer": 4}),
    "noloco": Method("noloco", {"period": 15}),
}


def adam(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam without weight decay."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def first_of(samples: int) -> Data:
    """So many samples of the training text, and all of the test text."""
    data = shakespeare_data()
    return replace(data, x=data.x[:samples], y=data.y[:samples])


def cut_to(task: Task, steps: int, workers: int) -> tuple[Task, int]:
    """The task with so many samples that whole epochs have about so many steps, and the number of epochs."""
    needed, there = steps * workers * task.batch, len(shakespeare_data().x)
    epochs = ceil(needed / there)
    return replace(task, data=partial(first_of, needed // epochs)), epochs


def train(method: Method, options: argparse.Namespace, seed: int) -> shoal.Result:
    """One run in virtual time."""
    task, epochs = cut_to(shakespeare(), options.steps, options.workers)
    if not method.decays:
        task = replace(task, optimizer=adam)
    return shoal.run(
        task,
        STRATEGIES.make(method.strategy, **method.options),
        workers=options.workers,
        epochs=epochs,
        seed=seed,
        lr=method.lr,
        codec=method.codec,
        transport="sim",
        network=options.network,
        compute=options.compute,
        tests=0,
    )


def figures_of(name: str, seed: int, options: argparse.Namespace) -> tuple[float, int, float]:
    """Loss, bytes sent and virtual seconds of one run."""
    torch.set_num_threads(1)  # a step is too small for more
    run = train(METHODS[name], options, seed)
    assert run.test_loss is not None  # the text has a test part
    return run.test_loss, run.bytes_sent, run.seconds


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Losses, bytes and seconds of every method; prints a line for each."""
    seeds = [int(seed) for seed in options.seeds.split(",")]
    names = options.only.split(";") if options.only else list(METHODS)
    found: dict[str, dict[str, Any]] = {}
    print(f"| method | rate | test loss, seeds {options.seeds} | mean | MB sent | virtual s |")
    print("|---|---|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        begun = {name: [pool.submit(figures_of, name, seed, options) for seed in seeds] for name in names}
        for name, runs in begun.items():
            losses, sent, seconds = zip(*(run.result() for run in runs), strict=True)
            each = {"losses": losses, "loss": mean(losses), "bytes": mean(sent), "seconds": mean(seconds)}
            found[name] = each
            listed = ", ".join(f"{loss:.3f}" for loss in losses)
            figures = f"{each['loss']:.3f} | {each['bytes'] / 1e6:,.2f} | {each['seconds']:,.1f}"
            print(f"| `{name}` | {METHODS[name].lr:g} | {listed} | {figures} |", flush=True)
    return found


FIGURES = ("loss", "bytes", "seconds")
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" width="640" height="400"
  font-family="system-ui, sans-serif">
<style>{css} .word {{ fill: var(--ink); font-size: 13px; }}</style>
<rect width="640" height="400" fill="var(--page)"/>
<text class="word" x="20" y="22">Test loss over bytes sent; lower and further left is better</text>
{marks}
</svg>
"""


def picture(found: dict[str, dict[str, Any]]) -> str:
    """A point for each method: bytes to the right, on a logarithmic scale, loss upwards."""
    places = {name: (log10(max(1.0, each["bytes"])), each["loss"]) for name, each in found.items()}
    (left, right), (low, high) = ((min(side), max(side)) for side in zip(*places.values(), strict=True))
    marks = []
    for power in range(int(left), int(right) + 2):
        x = 60 + 440 * (power - left) / ((right - left) or 1)
        if 40 <= x <= 600:
            marks.append(f'<text class="word" x="{x:.0f}" y="390">10^{power}</text>')
    words: list[tuple[float, float]] = []  # where they are, so that none lies on another
    for name, (sent, loss) in sorted(places.items(), key=lambda place: -place[1][1]):
        x = 60 + 440 * (sent - left) / ((right - left) or 1)
        y = 360 - 310 * (loss - low) / ((high - low) or 1)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="var(--ink)"/>')
        line = y + 4
        while any(abs(x - left_of) < 160 and abs(line - other) < 13 for left_of, other in words):
            line += 1
        words.append((x, line))
        marks.append(f'<text class="word" x="{x + 9:.1f}" y="{line:.1f}">{name} {loss:.3f}</text>')
    return PICTURE.format(css=CSS, marks="\n".join(marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1220, help="of each worker; 122 are an epoch of eight")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", default="0,1,2", help="numbers separated by commas")
    parser.add_argument("--only", help="some of the methods, separated by semicolons")
    parser.add_argument("--network", default="100Mbit,20ms")
    parser.add_argument("--compute", default="20ms")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--svg", type=Path, help="write the picture to this file")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if unknown := sorted(set((options.only or "").split(";")) - {*METHODS, ""}):
        parser.error(f"no method {unknown[0]!r}; there are {'; '.join(METHODS)}")
    found = measure(options)
    if options.svg:
        options.svg.write_text(picture(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({f"{name} {key}": each[key] for name, each in found.items() for key in FIGURES}))


if __name__ == "__main__":
    main()
