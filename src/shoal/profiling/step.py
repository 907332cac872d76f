"""Measures a training step on this machine, so that virtual time resembles real time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev
from time import perf_counter, thread_time

import torch
from torch import nn

from shoal.core.task import Data, Task
from shoal.replicas.module import build_model, build_replica
from shoal.sim import Compute
from shoal.strategies.single import Single

WARM_UP, LEAST_STEPS, LEAST_SECONDS = 3, 10, 1.0


@dataclass(frozen=True)
class Step:
    """A measured step: gradient and optimizer update of one batch."""

    seconds: float  # median
    jitter: float  # standard deviation over mean, without the slowest tenth of the steps
    steps: int
    fixed: float = 0.0  # share of it that half a batch takes, too

    def compute(self) -> Compute:
        """The same step in virtual time."""
        return Compute(mean=self.seconds, jitter=self.jitter, fixed=self.fixed)


def measure_step(task: Task, seed: int = 0, threads: int = 1) -> Step:
    """Time steps of a task for a second or more, and for half as long steps of half a batch.

    On one thread it measures the processor time of that, because other programs are no part of the modelled
    machine.
    """
    data, model = task.data(), build_model(task, seed)
    steps = _time(task, data, model, seed, threads, LEAST_SECONDS)
    usual = steps[: max(1, len(steps) * 9 // 10)]
    step = Step(median(steps), pstdev(usual) / fmean(usual), len(steps))
    if task.batch < 2:
        return step
    half = median(_time(task.but(task.batch // 2), data, model, seed, threads, LEAST_SECONDS / 2))
    rest = 1 - task.batch // 2 / task.batch  # of the samples
    return replace(step, fixed=min(1.0, max(0.0, 1 - (step.seconds - half) / (rest * step.seconds))))


def _time(task: Task, data: Data, model: nn.Module, seed: int, threads: int, seconds: float) -> list[float]:
    """Seconds of steps, the fastest first."""
    replica = build_replica(task, model, data, Single(), 0, 1, seed)
    now = thread_time if threads == 1 else perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        taken: list[float] = []
        while len(taken) < WARM_UP + LEAST_STEPS or sum(taken[WARM_UP:]) < seconds:
            began = now()
            coroutine = replica.gradient()
            try:
                coroutine.send(None)
            except StopIteration as end:
                replica.descend(end.value.vector)
            taken.append(now() - began)
    finally:
        torch.set_num_threads(before)
    return sorted(taken[WARM_UP:])
