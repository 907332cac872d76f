"""Speed of the simulator on one core: bare events of its kernel, and a thousand EASGD workers.

Bare events are the timers of processes that only sleep. The EASGD run has every part of a simulation: a
network, jitter, messages to a server, and a gradient of ten elements at every step.

    python benchmarks/simulator.py [--events 300000] [--workers 1000] [--steps 20] [--repeats 3] [--json FILE]
        [--task mnist]

With a task it also runs BMUF on as many workers with real gradients: one pass, four samples a worker and
step, averages every four steps. Its floor is the same number of batches in a plain loop of PyTorch.

Seconds are those of the processor, whatever else the machine does. The last line is JSON: events_per_second
and easgd_<workers>x<steps>_seconds, medians of the repeats; with a task bmuf_<workers>_seconds and
plain_loop_seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shoal import BMUF, EASGD, Compute, Network, run
from shoal.core.task import Task
from shoal.programs.tasks import TASKS
from shoal.sim import Kernel, Simulation
from shoal.sim.transport import Switch
from shoal.testing.problems import Problem, Quadratic, simulate

SLEEPERS = 1000
DIMENSIONS = 10
BATCH = PERIOD = 4
NETWORK = Network.parse("1Gbit,100us")
COMPUTE = Compute.parse("20ms,10%")


class Bowl(Quadratic):
    """Tells no loss: to compute it would take a sixth of the run, and says nothing of the simulator."""

    loss = Problem.loss


def sleep(events: int) -> int:
    """Run a thousand processes that only sleep, each a little longer; returns the number of events."""
    kernel = Kernel()
    switch = Switch(kernel, Network(), seed=0)

    async def sleeper(rank: int) -> None:
        for _ in range(events // SLEEPERS):
            await switch.ends[rank].sleep(1.0 + rank / SLEEPERS)

    for rank in range(SLEEPERS):
        switch.add().process = kernel.spawn(sleeper(rank), lambda: "sleeps")
    kernel.run()
    return kernel.events


def easgd(workers: int, steps: int) -> Simulation:
    """EASGD workers that exchange with the server at every fourth step."""
    return simulate(
        EASGD(period=4),
        Bowl(lr=0.1, targets=(1.0, -1.0)),
        workers=workers,
        steps=steps,
        start=[0.0] * DIMENSIONS,
        network=NETWORK,
        compute=COMPUTE,
    )


def bmuf(task: Task, workers: int) -> None:
    """One pass with real gradients in virtual time, in one thread."""
    run(
        task,
        BMUF(period=PERIOD),
        workers=workers,
        batch=BATCH,
        threads=1,
        transport="sim",
        network=NETWORK,
        compute=Compute.parse("20ms"),
    )


def plain_loop(task: Task) -> None:
    """The same number of batches and steps on one model, without Shoal."""
    data, model = task.data(), task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.lr)
    for x, y in zip(torch.split(data.x, BATCH), torch.split(data.y, BATCH), strict=True):
        optimizer.zero_grad()
        task.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def processor_seconds(action: Callable[[], object]) -> float:
    """What one thread needs for it, whatever else the machine does."""
    began = time.process_time()
    action()
    return time.process_time() - began


def real_gradients(word: str, workers: int) -> dict[str, float]:
    """Processor seconds of BMUF, and those of the plain loop that it cannot beat; data is loaded before."""
    task = TASKS.make(word)
    data = task.data()
    task = replace(task, data=lambda: data)
    return {
        f"bmuf_{workers}_seconds": round(processor_seconds(lambda: bmuf(task, workers)), 2),
        "plain_loop_seconds": round(processor_seconds(lambda: plain_loop(task)), 2),
    }


def spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=300_000, help="bare events")
    parser.add_argument("--workers", type=int, default=1000, help="EASGD workers")
    parser.add_argument("--steps", type=int, default=20, help="steps of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task", help="also run BMUF with real gradients of this task, such as mnist")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)

    events = sleep(options.events)
    repeats = range(options.repeats)
    rates = [events / processor_seconds(lambda: sleep(options.events)) for _ in repeats]
    took = [processor_seconds(lambda: easgd(options.workers, options.steps)) for _ in repeats]
    simulated = easgd(options.workers, options.steps)

    table = Table(
        title="The simulator on one core",
        caption=f"Processor time. Medians of {options.repeats}, in brackets the smallest and the largest.",
    )
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row(f"bare events a second, {events:,} timers", spread(rates, ",.0f"))
    table.add_row(f"EASGD, {options.workers:,} workers x {options.steps} steps, seconds", spread(took, ".2f"))
    table.add_row("    events of it", f"{simulated.kernel.events:,}")
    table.add_row("    virtual seconds of it", f"{simulated.seconds:.2f}")
    real = real_gradients(options.task, options.workers) if options.task else {}
    for what, seconds in real.items():
        table.add_row(f"{options.task}: {what}", f"{seconds:.2f}")
    Console().print(table)

    name = f"easgd_{options.workers}x{options.steps}_seconds"
    if options.json:
        figures: dict[str, Any] = {"events_per_second": rates, name: took, **real}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({"events_per_second": round(median(rates)), name: round(median(took), 3), **real}))


if __name__ == "__main__":
    main()
