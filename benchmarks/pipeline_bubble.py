"""The bubble of a real pipeline beside the simulated one: two processes over gloo, one thread each.

Both processes time every forward and backward pass of torch's own schedules. The simulation gets what
`shoal.split` measured beforehand, layer by layer, while both processes measured; and what messages of the
same size take, measured alone: gloo's latency and bandwidth, and the time for which posting and taking a
message keep a process from computing. Other programs lengthen passes and waits, so the shortest of all steps
counts, as the shortest round counts for a layer; the table has the median, too, and the share of the machine
that others used.

    python benchmarks/pipeline_bubble.py [--passes matmul] [--schedules gpipe,1f1b] [--microbatches 2,4,8]
        [--cut HALF] [--width 320] [--steps 40] [--json FILE]

`--passes sleep` replaces the products of matrices by pauses of 5 ms forward and 10 ms backward a layer, which
a busy machine hardly lengthens: what is left is how the schedule waits. `--cut` moves the cut: 8 of 24 layers
leave the second stage twice as much. The last line is JSON: for each schedule and number of microbatches, the
bubbles, and the shortest step over the simulated one.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine_load import Load
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.pipelines.partition import stage_costs
from shoal.pipelines.pipeline import Pipeline
from shoal.pipelines.schedules import SCHEDULES
from shoal.pipelines.virtual_step import MessageCost, simulate_step
from shoal.sim import Network

RANKS, SAMPLES = 2, 32  # samples of a microbatch
LAYERS = {"matmul": 24, "sleep": 4}
FORWARD_SECONDS, BACKWARD_SECONDS = 0.005, 0.010  # of a layer that sleeps
SETTLING_STEPS = 2
MESSAGES = 40  # of each kind that are timed
IDLE_SECONDS = 0.005  # before a message, as a pass is

Passes = list[tuple[float, float]]


@dataclass(frozen=True)
class Plan:
    """What both processes run."""

    passes: str
    words: list[str]
    numbers: list[int]
    steps: int
    cut: int
    width: int


class Sleep(torch.autograd.Function):
    """The identity, forward and backward, after a pause."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_SECONDS)
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, torch.zeros_like(weight)


class Pause(nn.Module):
    """A layer that sleeps, and has a parameter so that there is something to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Product(nn.Module):
    """tanh of a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def model(plan: Plan) -> nn.Module:
    """Equal layers, so that the cut alone decides how even the stages are."""
    layer = {"matmul": Product, "sleep": Pause}[plan.passes]
    return nn.Sequential(*(layer(plan.width) for _ in range(LAYERS[plan.passes])))


def timed(pass_one: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    """The same method, which also notes when it began and ended."""

    def call(*args: Any, **extra: Any) -> Any:
        began = time.monotonic()
        try:
            return pass_one(*args, **extra)
        finally:
            passes.append((began, time.monotonic()))

    return call


def post(operation: Any, message: Tensor, peer: int) -> list[dist.Work]:
    """Hand a message over as torch's schedules do."""
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, message, peer)])
    return works


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def message_cost(elements: int) -> MessageCost:
    """How long posting a message, and taking one that is there, keep a process from computing."""
    message, rank = torch.zeros(elements), dist.get_rank()
    sent, received = [], []
    for _ in range(MESSAGES):
        dist.barrier()
        time.sleep(IDLE_SECONDS * (1 + rank))  # the receiver comes later
        began = time.monotonic()
        works = post(dist.irecv if rank else dist.isend, message, 1 - rank)
        if rank == 0:
            sent.append(time.monotonic() - began)
        wait(works)
        if rank == 1:
            received.append(time.monotonic() - began)
    both = torch.tensor([median(sent or [0.0]), median(received or [0.0])], dtype=torch.float64)
    dist.all_reduce(both)
    return MessageCost(*both.tolist())


def link(elements: int, cost: MessageCost) -> Network:
    """Latency and bandwidth of gloo between the two processes, by messages there and back; less `cost`."""
    figures = []
    for number in (1, elements):
        message, trips = torch.zeros(number), []
        for _ in range(MESSAGES):
            dist.barrier()
            began = time.monotonic()
            for src in (0, 1):
                wait(post(dist.isend if dist.get_rank() == src else dist.irecv, message, 1 - dist.get_rank()))
            trips.append((time.monotonic() - began) / 2)
        figures.append(median(trips))
    empty, full = figures
    return Network(max(empty - cost.send, 0.0), 4 * elements / max(full - empty, 1e-9))


def work(folder: Path, rank: int, plan: Plan) -> None:
    """One process: every pipeline of the plan in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    messages = message_cost(SAMPLES * plan.width)
    network = link(SAMPLES * plan.width, messages)
    told = {
        f"{word} {microbatches}": run_pipeline(plan, word, microbatches, network, messages)
        for word in plan.words
        for microbatches in plan.numbers
    }
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def run_pipeline(
    plan: Plan, word: str, microbatches: int, network: Network, messages: MessageCost
) -> dict[str, Any]:
    """Steps of one pipeline: their passes in this process, and the prediction."""
    x = torch.randn(SAMPLES * microbatches, plan.width)
    dist.barrier()
    split = shoal.split(model(plan), x, stages=RANKS, microbatches=microbatches, network=network)
    proposal, bounds = split.proposal, (0, plan.cut, LAYERS[plan.passes])
    pipeline = Pipeline(proposal.chain, bounds, SCHEDULES[word], microbatches, F.mse_loss)
    forwards: Passes = []
    backwards: Passes = []
    stage = pipeline.schedule._stage
    stage.forward_one_chunk = timed(stage.forward_one_chunk, forwards)
    stage.backward_one_chunk = timed(stage.backward_one_chunk, backwards)
    load, before = Load(), time.process_time()
    for _ in range(SETTLING_STEPS + plan.steps):
        dist.barrier()
        pipeline.step(x, torch.zeros_like(x))
    own = torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(own)
    costs = stage_costs(proposal.layers, bounds)
    timeline = simulate_step(SCHEDULES[word], costs, microbatches, network, messages=messages)
    without = simulate_step(SCHEDULES[word], costs, microbatches, network)
    return {
        "steps": [
            [*forwards[i : i + microbatches], *backwards[i : i + microbatches]]
            for i in range(SETTLING_STEPS * microbatches, len(forwards), microbatches)
        ],
        "others": load.of_others(float(own)),
        "seconds": timeline.seconds,
        "bubble": timeline.bubble,
        "without": without.bubble,
        "stages": [(cost.forward, cost.backward) for cost in costs],
        "messages": (messages.send, messages.receive),
        "latency": network.latency,
        "bandwidth": network.bandwidth,
    }


def measure(line: list[str]) -> dict[str, dict[str, Any]]:
    """Start both processes, and put together what they tell."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *line, "--worker", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(k)], env=environment) for k in range(RANKS)]
        try:
            codes = [rank.wait(500) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"the processes ended with {codes}")
        told = [json.loads(Path(folder, f"{k}.json").read_text()) for k in range(RANKS)]
    return {name: summary([one[name] for one in told]) for name in told[0]}


def summary(told: list[dict[str, Any]]) -> dict[str, Any]:
    """A real step lasts from its first pass to the end of its last. The prediction is that of process 0."""
    lengths, shares = [], []
    for both in zip(*(one["steps"] for one in told), strict=True):
        passes = [one for own in both for one in own]
        lengths.append(max(end for _, end in passes) - min(began for began, _ in passes))
        shares.append(1 - sum(end - began for began, end in passes) / (RANKS * lengths[-1]))
    first, shortest = told[0], min(lengths)
    return {
        "simulated_seconds": first["seconds"],
        "real_seconds": shortest,
        "median_seconds": median(lengths),
        "simulated_bubble": first["bubble"],
        "bubble_without_message_cost": first["without"],
        "real_bubble": shares[lengths.index(shortest)],
        **{key: first[key] for key in ("others", "stages", "messages", "latency", "bandwidth")},
    }


def show(results: dict[str, dict[str, Any]], passes: str, cut: int) -> None:
    table = Table(
        title=f"A pipeline of 2 processes ({passes}), {cut} and {LAYERS[passes] - cut} layers",
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
        "more",
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
            f"{r['real_bubble'] / r['simulated_bubble'] - 1:+.0%}",
            f"{r['others']:.0%}",
        )
    Console(width=max(Console().width, 110)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", default="gpipe,1f1b", help="words separated by commas")
    parser.add_argument("--microbatches", default="2,4,8", help="numbers separated by commas")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each pipeline")
    parser.add_argument("--passes", choices=LAYERS, default="matmul", help="what a layer does")
    parser.add_argument("--cut", type=int, help="layers of the first stage; by default half of them")
    parser.add_argument("--width", type=int, default=320, help="of a layer")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder of both processes
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    words, numbers = options.schedules.split(","), [int(n) for n in options.microbatches.split(",")]
    layers = LAYERS[options.passes]
    cut = layers // 2 if options.cut is None else options.cut
    if not set(words) <= {"gpipe", "1f1b"} or not 0 < cut < layers:
        parser.error(f"schedules are gpipe and 1f1b, and the cut is between 1 and {layers - 1}")
    if options.worker:
        plan = Plan(options.passes, words, numbers, options.steps, cut, options.width)
        work(options.worker, options.rank, plan)
        return
    results = measure(sys.argv)
    show(results, options.passes, cut)
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
