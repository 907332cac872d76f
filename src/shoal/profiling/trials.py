"""Trials: short real runs on processes of this machine, to learn how long a step takes in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil

import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.codec import Identity
from shoal.core.task import Data, Task
from shoal.launch.audience import Audience
from shoal.profiling.step import Step, measure_step
from shoal.runs.plan import Plan
from shoal.runs.processes import run_in_process, run_processes
from shoal.runs.result import Result
from shoal.sim import Compute
from shoal.sim.hardware import Machine
from shoal.strategies.local import Local
from shoal.vocabulary.strategy import Strategy

TRIAL_SECONDS = 1.5
"""How long the steps of a trial take, about; its processes need as long again to start."""

NEVER = 1 << 40
"""A period that no trial comes to the end of."""

BY_MESSAGES = "stripes"
"""The collective of trials, real and virtual: messages are fitted to runs that send them."""

BATCH = 32
"""Of the net that is tried where no task is given."""


def net_task(width: int, steps: int, batch: int = BATCH) -> Task:
    """A net with two layers of that width, and samples for so many steps. Real training, as caches see it."""
    return Task("net", partial(_net, width), partial(_noise, width, steps * batch), F.mse_loss, batch=batch)


def step_seconds(
    task: Task, strategy: Strategy, workers: int, transport: str, threads: int = 1, epochs: int = 1
) -> float:
    """Seconds of a step, averages included, while so many processes train all of a task's data together.

    Averages go by messages, as in virtual time, where there is no mapped memory to form them in.
    """
    settings = {"workers": workers, "transport": transport, "threads": threads, "epochs": epochs, "tests": 0}
    plan = Plan(task, strategy, Identity(), collective=BY_MESSAGES, **settings)  # type: ignore[arg-type]
    result = run_processes(plan, Audience(None)) if plan.nodes > 1 else _run_here(plan, threads)
    steps: int = max(node["steps"] for node in result.nodes if node["role"] == "worker")
    return result.seconds / steps


def _run_here(plan: Plan, threads: int) -> Result:
    """Train a single worker in this process: to start another takes longer than its steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run_in_process(plan, Audience(None))
    finally:
        torch.set_num_threads(before)


def measure_step_among(task: Task, processes: int, seed: int = 0, threads: int = 1) -> Step:
    """A step while so many processes of this machine train it, everything that belongs to a step included.

    They do not talk to each other. All are as slow as the slowest: those that average wait for it.
    """
    alone = measure_step(task, seed, threads)
    needed = max(2, ceil(TRIAL_SECONDS / alone.seconds)) * task.batch * processes
    epochs = ceil(needed / len(task.data().x))
    some = replace(task, data=partial(_some, task.data, needed)) if epochs == 1 else task
    seconds = step_seconds(some, Local(period=NEVER), processes, "processes", threads, epochs)
    return replace(alone, seconds=seconds)


def compute_here(task: Task, machine: Machine, processes: int, seed: int = 0, threads: int = 1) -> Compute:
    """What a gradient takes on this machine, for virtual time: by a trial with a core for each process.

    The same trial is made once: runs that are compared have the same step.
    """
    busy = min(processes, machine.cores)
    measure = _measured_once if _is_hashable(task) else measure_step_among
    step = measure(task, busy, seed, threads)
    return replace(step.compute(), mean=step.seconds * machine.speed(busy))


@lru_cache(maxsize=16)
def _measured_once(task: Task, processes: int, seed: int, threads: int) -> Step:
    return measure_step_among(task, processes, seed, threads)


def _is_hashable(task: Task) -> bool:
    try:
        hash(task)
    except TypeError:  # one of its functions is an object of the user's that has no hash
        return False
    return True


def _some(data: Callable[[], Data], samples: int) -> Data:
    """The first samples, to train with."""
    whole = data()
    return Data(whole.x[:samples], whole.y[:samples], whole.test_x[:1], whole.test_y[:1])


def _net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def _noise(width: int, samples: int) -> Data:
    noise = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return Data(noise, noise, noise[:1], noise[:1])
