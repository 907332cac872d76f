"""Step time of Shoal's `sync` over gloo against DistributedDataParallel, in one run.

Two worker processes with one thread each train the same model twice from the same weights on the same
batches: once wrapped in DDP, once attached to Shoal as by `shoal run --transport gloo`. The two sides take
turns, a block of steps each, in the order ABBA, so that load from other programs affects both. Afterwards
their weights must be equal. Times are those of worker 0. A busy machine distorts the ratio, because the two
sides wait in different ways: pairs of blocks during which other programs used over a tenth of the machine are
discarded if enough pairs remain.

    python benchmarks/step_time.py [--models mlp,mlp_30m,cnn] [--blocks 20] [--steps 25] [--json FILE]

The last line is JSON: for each model, Shoal's median step over DDP's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from machine_load import Load
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.api.script import run_script
from shoal.launch.environment import Place
from shoal.strategies import Sync

WORKERS = 2
BATCH = 64
POOL = 16  # batches in memory, used in turn
SETTLING_STEPS = 3  # untimed, at the start of each block: the caches still hold the other side's tensors
QUIET = 0.1  # share of the machine that other programs may use
FEWEST_PAIRS = 5  # quiet pairs; if there are fewer, all pairs count
TOLERANCE = 1e-6  # for weights below 1: both sides sum the same two numbers and scale by powers of two


def mlp() -> nn.Module:
    """784-1088-1088-10; 2,049,802 parameters."""
    return nn.Sequential(
        nn.Linear(784, 1088), nn.ReLU(), nn.Linear(1088, 1088), nn.ReLU(), nn.Linear(1088, 10)
    )


def mlp_30m() -> nn.Module:
    """784-3650-3650-3650-10; 29,554,060 parameters."""
    layers: list[nn.Module] = [nn.Linear(784, 3650), nn.ReLU()]
    layers += [nn.Linear(3650, 3650), nn.ReLU(), nn.Linear(3650, 3650), nn.ReLU(), nn.Linear(3650, 10)]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """Two convolutions with strides and a linear layer; 20,490 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "mlp_30m": mlp_30m, "cnn": cnn}


@dataclass
class Side:
    """One of the two trainings: its model and its measurements, block by block."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[list[float]] = field(default_factory=list)  # of each timed step
    others: list[float] = field(default_factory=list)  # share of the machine that other programs used
    steps: int = 0

    def train(self, batches: list[tuple[Tensor, Tensor]], steps: int) -> None:
        """A block of steps, written as in a user's script."""
        seconds = []
        dist.barrier()
        load, before = Load(), time.process_time()
        for _ in range(SETTLING_STEPS + steps):
            x, y = batches[self.steps % len(batches)]
            began = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            seconds.append(time.perf_counter() - began)
            self.steps += 1
        self.seconds.append(seconds[SETTLING_STEPS:])
        own = torch.tensor([time.process_time() - before], dtype=torch.float64)
        dist.all_reduce(own)  # of both workers
        self.others.append(load.of_others(float(own)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def work(name: str, blocks: int, steps: int, folder: Path) -> None:
    """One worker process: both sides, in turn. Worker 0 writes its measurements to the folder."""
    torch.set_num_threads(1)
    rank = Place.find().rank
    generator = torch.Generator().manual_seed(rank)
    pool = torch.randn(POOL, BATCH, 784, generator=generator)
    labels = torch.randint(10, (POOL, BATCH), generator=generator)
    batches = list(zip(pool, labels, strict=True))

    torch.manual_seed(0)
    ours, theirs = MODELS[name](), MODELS[name]()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    dist.init_process_group("gloo", f"file://{folder}/ddp", rank=rank, world_size=WORKERS)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    sides = {"ddp": Side(ddp, optimizer_of(ddp)), "shoal": Side(ours, optimizer_of(ours))}
    attachment = shoal.attach(ours, sides["shoal"].optimizer)
    attachment.saw(BATCH)
    for block in range(-1, blocks):  # the first is not measured: DDP still arranges its buckets
        for side in ("ddp", "shoal") if block % 2 else ("shoal", "ddp"):
            sides[side].train(batches, steps)
    attachment.finish()
    with torch.no_grad():
        both = zip(ours.parameters(), theirs.parameters(), strict=True)
        apart = max(float((a - b).abs().max()) for a, b in both)
    dist.destroy_process_group()
    if rank == 0:
        measured = {side: {"seconds": s.seconds[1:], "others": s.others[1:]} for side, s in sides.items()}
        (folder / "measured").write_text(json.dumps({**measured, "apart": apart}))


def measure(name: str, blocks: int, steps: int) -> dict[str, Any]:
    """Start the worker processes for one model, and summarise the measurements of worker 0."""
    with tempfile.TemporaryDirectory() as folder:
        run_script(
            __file__,
            ["--worker", folder, "--models", name, "--blocks", str(blocks), "--steps", str(steps)],
            workers=WORKERS,
            strategy=Sync(),
            place=Place(transport="gloo", strategy="sync"),
            on_progress=lambda event: None,
            on_output=lambda worker, line: print(f"{worker}: {line}"),
        )
        raw = json.loads((Path(folder) / "measured").read_text())
    if raw["apart"] > TOLERANCE:
        raise SystemExit(
            f"{name}: the weights of both sides differ by {raw['apart']:g}, so they did different work"
        )
    others = [max(pair) for pair in zip(raw["ddp"]["others"], raw["shoal"]["others"], strict=True)]
    quiet = [pair for pair, share in enumerate(others) if share <= QUIET]
    counted = quiet if len(quiet) >= FEWEST_PAIRS else list(range(blocks))
    ddp, ours = ([raw[side]["seconds"][pair] for pair in counted] for side in ("ddp", "shoal"))
    return {
        "parameters": sum(p.numel() for p in MODELS[name]().parameters()),
        "pairs": blocks,
        "pairs_counted": len(counted),
        "others": median(others[pair] for pair in counted),
        "ddp_ms": [1000 * q for q in quartiles([median(block) for block in ddp])],
        "shoal_ms": [1000 * q for q in quartiles([median(block) for block in ours])],
        "ratio": median(chain.from_iterable(ours)) / median(chain.from_iterable(ddp)),
        "ratio_of_pairs": quartiles([median(a) / median(b) for a, b in zip(ours, ddp, strict=True)]),
        "largest_difference": raw["apart"],
    }


def quartiles(values: list[float]) -> list[float]:
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def show(results: dict[str, dict[str, Any]], steps: int) -> None:
    table = Table(
        title=f"Step time, {WORKERS} workers over gloo, batch {BATCH} each, SGD with momentum",
        caption=f"Medians of blocks of {steps} steps, in brackets their quartiles; others: the share of the "
        f"machine that other programs used. Weights of both sides equal within {TOLERANCE:g}.",
    )
    table.add_column("model")
    for column in ("parameters", "DDP, ms", "Shoal, ms", "ratio", "ratio by pairs", "pairs", "others"):
        table.add_column(column, justify="right")
    for name, r in results.items():
        table.add_row(
            name,
            f"{r['parameters']:,}",
            spread(r["ddp_ms"], 1),
            spread(r["shoal_ms"], 1),
            f"{r['ratio']:.3f}",
            spread(r["ratio_of_pairs"], 2),
            f"{r['pairs_counted']} of {r['pairs']}",
            f"{r['others']:.0%}",
        )
    Console(width=max(Console().width, 110)).print(table)


def spread(quarters: list[float], digits: int) -> str:
    low, middle, high = quarters
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="mlp,mlp_30m,cnn", help="names separated by commas")
    parser.add_argument("--blocks", type=int, default=20, help="blocks on each side")
    parser.add_argument("--steps", type=int, default=25, help="timed steps in a block")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder of a worker process
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.worker:
        work(names[0], options.blocks, options.steps, options.worker)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # DDP, like Shoal, on this host alone
    results = {name: measure(name, options.blocks, options.steps) for name in names}
    show(results, options.steps)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({name: round(r["ratio"], 4) for name, r in results.items()}))


if __name__ == "__main__":
    main()
