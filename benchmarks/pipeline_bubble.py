"""The bubble of a real pipeline beside the simulated one: two processes over gloo, one thread each.

Both processes time every forward and backward pass of torch's own schedules. The simulation gets what
`shoal.split` measured beforehand, layer by layer, while both processes measured; and the latency and
bandwidth of gloo, measured with messages of the same size. Other programs lengthen passes and waits, so the
shortest of all steps counts, as the shortest round counts for a layer; the table has the median, too, and the
share of the machine that others used.

    python benchmarks/pipeline_bubble.py [--schedules gpipe,1f1b] [--microbatches 2,4,8] [--steps 60]
        [--cut 12] [--json FILE]

`--cut` moves the cut: 12 of 24 layers are equal stages, 8 leave the second stage twice as much. The last line
is JSON: for each schedule and number of microbatches, the bubbles, and the shortest step over the simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine_load import Load
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.pipelines.partition import stage_costs
from shoal.pipelines.pipeline import Pipeline
from shoal.pipelines.schedules import SCHEDULES
from shoal.pipelines.virtual_step import simulate_step
from shoal.sim import Network

RANKS, LAYERS, WIDTH, SAMPLES = 2, 24, 320, 32  # samples of a microbatch
SETTLING_STEPS = 2

Passes = list[tuple[float, float]]


def model() -> nn.Module:
    """Equal layers, so that the cut alone decides how even the stages are."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def timed(pass_one: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    """The same method, which also notes when it began and ended."""

    def call(*args: Any, **extra: Any) -> Any:
        began = time.monotonic()
        try:
            return pass_one(*args, **extra)
        finally:
            passes.append((began, time.monotonic()))

    return call


def link() -> Network:
    """Latency and bandwidth of gloo between the two processes, by messages there and back."""
    figures = []
    for elements in (1, SAMPLES * WIDTH):
        message, trips = torch.zeros(elements), []
        for _ in range(30):
            dist.barrier()
            began = time.monotonic()
            for src in (0, 1):
                dist.send(message, 1) if dist.get_rank() == src == 0 else None
                dist.send(message, 0) if dist.get_rank() == src == 1 else None
                dist.recv(message, src) if dist.get_rank() != src else None
            trips.append((time.monotonic() - began) / 2)
        figures.append(min(trips))
    empty, full = figures
    return Network(empty, 4 * SAMPLES * WIDTH / max(full - empty, 1e-9))


def work(folder: Path, rank: int, word: str, microbatches: int, steps: int, cut: int) -> None:
    """One process: steps of the pipeline, their passes, and at process 0 the prediction."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    x = torch.randn(SAMPLES * microbatches, WIDTH)
    network = link()
    dist.barrier()
    split = shoal.split(model(), x, stages=RANKS, microbatches=microbatches, network=network)
    layers = 2 * cut  # a linear layer and its tanh each
    fixed = replace(split.proposal, bounds=(0, layers, 2 * LAYERS))
    pipeline = Pipeline(fixed, F.mse_loss, word)
    forwards: Passes = []
    backwards: Passes = []
    stage = pipeline.schedule._stage
    stage.forward_one_chunk = timed(stage.forward_one_chunk, forwards)
    stage.backward_one_chunk = timed(stage.backward_one_chunk, backwards)
    load, before = Load(), time.process_time()
    for _ in range(SETTLING_STEPS + steps):
        dist.barrier()
        pipeline.step(x, torch.zeros_like(x))
    own = torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(own)
    told: dict[str, Any] = {
        "forwards": forwards,
        "backwards": backwards,
        "others": load.of_others(float(own)),
    }
    if rank == 0:
        costs = stage_costs(fixed.layers, fixed.bounds)
        timeline = simulate_step(SCHEDULES[word], costs, microbatches, network)
        told |= {"seconds": timeline.seconds, "bubble": timeline.bubble, "latency": network.latency}
        told |= {"bandwidth": network.bandwidth, "stages": [(c.forward, c.backward) for c in costs]}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def measure(word: str, microbatches: int, steps: int, cut: int) -> dict[str, Any]:
    """Start both processes. A real step lasts from its first pass to the end of its last."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--worker", folder, "--schedules", word, "--steps", str(steps)]
        line += ["--microbatches", str(microbatches), "--cut", str(cut)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*line, "--rank", str(k)], env=environment) for k in range(RANKS)]
        try:
            codes = [rank.wait(300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"{word}: the processes ended with {codes}")
        told = [json.loads(Path(folder, f"{k}.json").read_text()) for k in range(RANKS)]
    lengths, busy = [], []
    for step in range(SETTLING_STEPS, SETTLING_STEPS + steps):
        own = slice(step * microbatches, (step + 1) * microbatches)
        passes = [p for one in told for kind in ("forwards", "backwards") for p in one[kind][own]]
        lengths.append(max(end for _, end in passes) - min(began for began, _ in passes))
        busy.append(sum(end - began for began, end in passes))
    shares = [1 - b / (RANKS * length) for b, length in zip(busy, lengths, strict=True)]
    first, shortest = told[0], min(lengths)
    return {
        "simulated_seconds": first["seconds"],
        "real_seconds": shortest,
        "median_seconds": median(lengths),
        "simulated_bubble": first["bubble"],
        "real_bubble": shares[lengths.index(shortest)],
        "others": first["others"],
        "stages": first["stages"],
        "latency": first["latency"],
        "bandwidth": first["bandwidth"],
    }


def show(results: dict[str, dict[str, Any]], cut: int) -> None:
    table = Table(
        title=f"A pipeline of 2 processes, {cut} and {LAYERS - cut} layers of {WIDTH} units",
        caption="Real: the shortest step. Others: the share of the machine that other programs used.",
    )
    table.add_column("schedule, microbatches")
    for column in (
        "simulated, ms",
        "real, ms",
        "median, ms",
        "ratio",
        "simulated bubble",
        "real bubble",
        "others",
    ):
        table.add_column(column, justify="right")
    for name, r in results.items():
        table.add_row(
            name,
            f"{1e3 * r['simulated_seconds']:.1f}",
            f"{1e3 * r['real_seconds']:.1f}",
            f"{1e3 * r['median_seconds']:.1f}",
            f"{r['real_seconds'] / r['simulated_seconds']:.2f}",
            f"{r['simulated_bubble']:.1%}",
            f"{r['real_bubble']:.1%}",
            f"{r['others']:.0%}",
        )
    Console(width=max(Console().width, 110)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", default="gpipe,1f1b", help="words separated by commas")
    parser.add_argument("--microbatches", default="2,4,8", help="numbers separated by commas")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each pipeline")
    parser.add_argument("--cut", type=int, default=LAYERS // 2, help="layers of the first stage")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder of both processes
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    words, numbers = options.schedules.split(","), [int(n) for n in options.microbatches.split(",")]
    if not set(words) <= {"gpipe", "1f1b"} or not 0 < options.cut < LAYERS:
        parser.error(f"schedules are gpipe and 1f1b, and the cut is between 1 and {LAYERS - 1}")
    if options.worker:
        work(options.worker, options.rank, words[0], numbers[0], options.steps, options.cut)
        return
    results = {}
    for word in words:
        for number in numbers:
            results[f"{word} {number}"] = measure(word, number, options.steps, options.cut)
    show(results, options.cut)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    figures = {}
    for name, r in results.items():
        figures[f"{name} simulated bubble"] = round(r["simulated_bubble"], 4)
        figures[f"{name} real bubble"] = round(r["real_bubble"], 4)
        figures[f"{name} real over simulated step"] = round(r["real_seconds"] / r["simulated_seconds"], 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
