"""Act 1: real processes on this machine, one worker against two.

Beside them two workers that never talk, which is the ceiling, and DDP on the same work. The four take turns,
so that a busy moment of the machine does not favour one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from shoal.core.task import Data, Task
from shoal.demo.machine_load import MachineLoad
from shoal.demo.plain_ddp import run_ddp
from shoal.runs.result import Result
from shoal.strategies.bmuf import BMUF
from shoal.strategies.ensemble import Ensemble
from shoal.strategies.single import Single
from shoal.studies.study import Lab

ONE, TWO, DDP, APART = "one worker", "two workers, bmuf", "two workers, DDP", "two that never talk"
WORKERS = 2
PERIOD = 16
MOST_ROUNDS = 5


@dataclass(frozen=True)
class Trial:
    """One run: the time of its samples, and the accuracy on the test set where it was tested."""

    seconds: float
    accuracy: float | None


@dataclass(frozen=True)
class ThisMachine:
    """The figures of act 1. Every round has a trial of each kind, with a seed of its own."""

    load: MachineLoad
    parameters: int
    samples: int
    batch: int
    rounds: Sequence[Mapping[str, Trial]]

    def speed_ups(self, kind: str) -> list[float]:
        """How many times as fast as one worker, in each round."""
        return [trials[ONE].seconds / trials[kind].seconds for trials in self.rounds]

    def speed_up(self, kind: str) -> float:
        """The median of the rounds."""
        return median(self.speed_ups(kind))

    def accuracy(self, kind: str) -> float | None:
        """The mean of the rounds, in per cent; None for a kind that was not tested."""
        reached = [trials[kind].accuracy for trials in self.rounds]
        return fmean(found for found in reached if found is not None) if None not in reached else None


def train_here(lab: Lab, load: MachineLoad, task: Task, epochs: int, seconds: float) -> ThisMachine:
    """Run as many rounds as fit into `seconds`, at least one."""
    rounds: list[Mapping[str, Trial]] = []
    results: list[Result] = []
    began = time.monotonic()
    while not rounds or (len(rounds) < MOST_ROUNDS and _has_time(began, seconds, len(rounds))):
        rounds.append(_round(lab, task, epochs, len(rounds), results))
    first = results[0]
    return ThisMachine(load, first.parameters, first.samples, task.batch, rounds)


def _has_time(began: float, seconds: float, rounds: int) -> bool:
    """Whether another round as long as those before it ends in time."""
    passed = time.monotonic() - began
    return passed + passed / rounds <= seconds


def _round(lab: Lab, task: Task, epochs: int, seed: int, results: list[Result]) -> Mapping[str, Trial]:
    title = f"act 1 of 3, round {seed + 1}: "
    untested = replace(task, data=partial(_without_tests, task.data))
    common = {"epochs": epochs, "seed": seed, "threads": 1}
    one = lab.run(title + ONE, task, Single(), **common)
    two = lab.run(title + TWO, task, BMUF(period=PERIOD, warmup=0), workers=WORKERS, **common)
    apart = lab.run(title + APART, untested, Ensemble(), workers=WORKERS, **common)
    lab.say(title + DDP)
    ddp = run_ddp(task, WORKERS, epochs, seed)
    lab.keep(title + DDP, ddp)
    results.append(one)
    return {
        ONE: Trial(one.seconds, one.test_accuracy),
        TWO: Trial(two.seconds, two.test_accuracy),
        APART: Trial(apart.seconds, None),
        DDP: Trial(ddp["seconds"], ddp["test_accuracy"]),
    }


def _without_tests(data: Callable[[], Data]) -> Data:
    """The same training data: models that never talk are here for their speed alone."""
    whole = data()
    return replace(whole, test_x=whole.test_x[:0], test_y=whole.test_y[:0])
