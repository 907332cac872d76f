"""How much of a machine's cores each strategy uses: samples a second, as a share of workers that never talk.

Every round runs one plain process, workers that never talk (the ceiling), DDP and each strategy, one after
the other, each with one thread a process, so that a busy moment favours nobody.

    python benchmarks/cores.py [--workers 2] [--models mlp_2m] [--batches 64,512] [--seconds 3]
        [--strategies ddp,sync,bmuf:period=16,diloco:period=16,easgd:period=16] [--rounds 3]

The table has medians over the rounds and their spread, in times one plain process and as shares of the
ceiling. The last line is JSON: "model/batch" -> strategy -> share of the ceiling, and for `ceiling` times one
plain process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import shoal
from shoal.core.catalogue import split_list
from shoal.demo.plain_ddp import run_ddp
from shoal.profiling.step import measure_step

STRATEGIES = "ddp,sync,bmuf:period=16,diloco:period=16,easgd:period=16,hogwild,gossip,asgd"
LAYERS = {"mlp_2m": (784, 1024, 1024, 10), "mlp_30m": (1024, 4800, 4800, 10)}
BATCHES = 8
"""Of a worker's share: an epoch is so many steps."""

PLAIN, CEILING = "plain", "ceiling"


def mlp(layers: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them."""
    modules = [part for pair in pairwise(layers) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*modules[:-1])


def noise(width: int, classes: int, samples: int) -> shoal.Data:
    """Random inputs and labels."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, width, generator=draw), torch.randint(classes, (samples,), generator=draw)
    return shoal.Data(x, y, x[:1], y[:1])


def task_of(model: str, batch: int, workers: int) -> shoal.Task:
    """The net with enough samples for so many workers."""
    layers = LAYERS[model]
    data = partial(noise, layers[0], layers[-1], BATCHES * batch * workers)
    return shoal.Task(model, partial(mlp, layers), data, batch=batch, lr=0.01)


def rate(word: str, model: str, batch: int, workers: int, epochs: int) -> float:
    """Samples a second of all workers together."""
    workers = 1 if word == PLAIN else workers
    task = task_of(model, batch, 1 if word == CEILING else workers)  # there each worker has all of it
    if word == "ddp":
        return epochs * BATCHES * batch * workers / float(run_ddp(task, workers, epochs, 0)["seconds"])
    strategy = shoal.strategies.STRATEGIES.read(
        {PLAIN: "single", CEILING: "ensemble:all_data=true"}.get(word, word)
    )
    result = shoal.run(task, strategy, workers=workers, epochs=epochs, tests=0, threads=1)
    return result.samples_per_second


def measure(
    options: argparse.Namespace, model: str, batch: int, words: Sequence[str]
) -> dict[str, list[float]]:
    """Of each strategy the rate in each round, in times that of one plain process in that round."""
    step = measure_step(task_of(model, batch, 1)).seconds
    epochs = max(1, round(options.seconds / step / BATCHES))
    found: dict[str, list[float]] = {word: [] for word in words}
    for _ in range(options.rounds):
        rates = {word: rate(word, model, batch, options.workers, epochs) for word in (PLAIN, *words)}
        for word in words:
            found[word].append(rates[word] / rates[PLAIN])
        times = {word: round(of[-1], 2) for word, of in found.items()}
        print(f"{model}/{batch}: one plain process {rates[PLAIN]:,.0f} samples/s;", times, flush=True)
    return found


def shares(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each strategy's share of the ceiling; of the ceiling, in times one plain process."""
    ceiling = times[CEILING]
    share = {word: median(a / b for a, b in zip(of, ceiling, strict=True)) for word, of in times.items()}
    return {**share, CEILING: median(ceiling)}


def show(model: str, times: Mapping[str, Sequence[float]]) -> None:
    """Print one table."""
    table = Table(title=model)
    for name in ("strategy", "times one plain process", "share of the ceiling"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for word, of in times.items():
        parts = [a / b for a, b in zip(of, times[CEILING], strict=True)]
        spread = f"{median(of):.2f} ({min(of):.2f} to {max(of):.2f})"
        table.add_row(word, spread, f"{median(parts):.0%} ({min(parts):.0%} to {max(parts):.0%})")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="mlp_2m")
    parser.add_argument("--batches", default="64,512")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a run of one process, about")
    options = parser.parse_args()
    words = [CEILING, *split_words(options.strategies)]
    for word in words[1:]:
        if word != "ddp":
            shoal.strategies.STRATEGIES.read(word)  # before minutes of measuring
    result = {}
    for model in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            times = measure(options, model, batch, words)
            show(f"{model}/{batch}, {options.workers} workers", times)
            result[f"{model}/{batch}"] = shares(times)
    print(json.dumps(result))


def split_words(text: str) -> list[str]:
    """The strategies of a list, with their options; `bmuf:16` is short for `bmuf:period=16`."""
    pairs = [(word, *word.partition(":")) for word in split_list(text)]
    return [f"{name}:period={option}" if option.isdigit() else word for word, name, _, option in pairs]


if __name__ == "__main__":
    main()
