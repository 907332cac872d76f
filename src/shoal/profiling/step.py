"""Calibration: measure a training step on this machine, so that virtual time resembles real time."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median, pstdev
from time import thread_time

import torch

from shoal.core.task import Task
from shoal.replicas.module import build_model, build_replica
from shoal.sim import Compute
from shoal.strategies.single import Single

WARM_UP, LEAST_STEPS, LEAST_SECONDS = 3, 10, 1.0


@dataclass(frozen=True)
class Step:
    """A measured step: gradient and optimizer update of one batch, on one thread."""

    seconds: float  # median
    jitter: float  # standard deviation over mean, without the slowest tenth of the steps
    steps: int

    def compute(self) -> Compute:
        """The same step in virtual time."""
        return Compute(mean=self.seconds, jitter=self.jitter)


def measure_step(task: Task, seed: int = 0) -> Step:
    """Time steps of a task on one thread for a second or more.

    Measures processor time of the thread, because other programs are no part of the modelled machine.
    """
    replica = build_replica(task, build_model(task, seed), task.data(), Single(), 0, 1, seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken: list[float] = []
        while len(taken) < WARM_UP + LEAST_STEPS or sum(taken[WARM_UP:]) < LEAST_SECONDS:
            began = thread_time()
            coroutine = replica.gradient()
            try:
                coroutine.send(None)
            except StopIteration as end:
                replica.descend(end.value.vector)
            taken.append(thread_time() - began)
    finally:
        torch.set_num_threads(before)
    steps = sorted(taken[WARM_UP:])
    usual = steps[: max(1, len(steps) * 9 // 10)]
    return Step(median(steps), pstdev(usual) / fmean(usual), len(steps))
