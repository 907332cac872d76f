"""The accuracy pass: short runs with real gradients in virtual time, the worse half given up again and again.

Every setting of a round trains on equally many samples. After each round the half that is further from the
goal is given up, and the rest trains for twice as long, from the start (successive halving: Jamieson and
Talwalkar 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import fmean, stdev
from time import process_time
from typing import Any

import torch

from shoal.api.run import run
from shoal.core.errors import Diverged
from shoal.core.task import Data, Task
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, log_ratios, ratio_of
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile

TESTS = 12  # of the model in a short run
MOST_TESTED = 2_000  # samples of the test set
ROUNDS = 3  # of halving
AT_FIRST = 8  # settings
LONGEST = 0.10  # of the steps of the run that is planned
LONGEST_OF_SHORT = 0.5  # the same for a run that is so short that a plan takes no time
SEEDS = 2  # of one worker, and of the settings of the last round

CROWD = 1.5  # times as long as one worker's samples those of many take to simulate
LEAST_STEPS = 16  # of each worker in the last round
LEAST_ROUNDS = 3  # exchanges in it

Score = Callable[[Contender, float], float]
"""(setting, its ratio of samples) -> what is to be small."""


@dataclass
class TrialRun:
    """One short run."""

    contender: Contender
    seed: int
    samples: int
    curve: Sequence[Mapping[str, Any]]
    seconds: float  # of virtual time
    nbytes: float
    taken: float  # of the processor

    @property
    def diverged(self) -> bool:
        """Whether it came to nothing."""
        return not self.curve


@dataclass
class Bench:
    """Makes short runs of a task, and keeps account of what they take."""

    task: Task
    network: Network | None
    compute: Callable[[Contender], Compute]
    profile: Profile | None
    scale_lr: str = "auto"
    seed: int = 0
    tell: Callable[[str], None] = lambda _: None
    taken: float = 0.0  # seconds of the processor so far
    _data: Data | None = field(default=None, repr=False)

    @property
    def data(self) -> Data:
        """The task's data, with a smaller test set."""
        if self._data is None:
            whole = self.task.data()
            order = torch.randperm(len(whole.test_x), generator=torch.Generator().manual_seed(self.seed))
            few = order[:MOST_TESTED]
            self._data = replace(whole, test_x=whole.test_x[few], test_y=whole.test_y[few])
        return self._data

    def run(self, contender: Contender, samples: int, seed: int) -> TrialRun:
        """Train on so many samples."""
        self.tell(f"{contender.name} on {samples:,} samples")
        began = process_time()
        data = self.data
        epochs = max(1, round(samples / len(data.x)))
        if samples < len(data.x):
            order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))[:samples]
            data = replace(data, x=data.x[order], y=data.y[order])
        try:
            result = run(
                replace(self.task, data=lambda: data),
                contender.strategy,
                workers=contender.workers,
                servers=contender.servers,
                codec=contender.codec,
                epochs=epochs,
                seed=seed,
                transport="sim",
                network=self.network,
                compute=self.compute(contender),
                profile=self.profile,
                scale_lr=self.scale_lr if contender.workers > 1 else "none",
                tests=TESTS,
            )
            curve, seconds, sent = result.curve, result.seconds, float(result.bytes_sent)
            if not isfinite(result.test_loss or 0.0):
                curve = []
        except Diverged:
            curve, seconds, sent = [], 0.0, 0.0
        except ValueError as error:
            if contender == SINGLE:
                raise
            self.tell(f"{contender.name} cannot be run: {error}")
            curve, seconds, sent = [], 0.0, 0.0
        taken = process_time() - began
        self.taken += taken
        return TrialRun(contender, seed, epochs * len(data.x), curve, seconds, sent, taken)


@dataclass(frozen=True)
class Tried:
    """What the short runs of a setting have shown."""

    contender: Contender
    ratio: Estimate  # samples needed over those of one worker
    seconds: float  # of virtual time for each sample
    nbytes: float  # sent for each sample
    samples: int  # of its longest run
    seeds: int
    given_up: bool = False  # after a round before the last


@dataclass(frozen=True)
class Race:
    """The outcome of the accuracy pass."""

    baseline: Baseline
    tried: Sequence[Tried]  # the best first
    seed_spread: float


def needed(contender: Contender, batch: int) -> int:
    """Samples that tell something of a setting: some steps of each worker, and some exchanges."""
    return batch * contender.workers * max(LEAST_STEPS, LEAST_ROUNDS * contender.period)


@dataclass(frozen=True)
class Allowance:
    """What a race may cost: seconds, and the samples of its longest run."""

    seconds: float
    samples: int
    rate: float  # a guess of the seconds for each sample, before the first run tells

    def first(self) -> int:
        """Samples of the first run of one worker: a quarter of the seconds at most."""
        return min(self.samples, int(self.seconds / 4 / self.rate)) if self.rate else self.samples

    def usual(self, entrants: int) -> int:
        """Samples of the last run of each if so many enter, going by the guess."""
        return (
            min(self.samples, int(self.seconds / self.rate / _runs(entrants))) if self.rate else self.samples
        )

    def rest(self, entrants: Sequence[Contender], batch: int, done: TrialRun) -> tuple[list[Contender], int]:
        """Those who enter after that run, as many as can take enough steps, and the samples of their last."""
        left = max(0.0, self.seconds - done.taken) * done.samples / max(CROWD * done.taken, 1e-9)
        for number in range(len(entrants), 0, -1):
            length = min(self.samples, int(left / (_runs(number) - 1)))
            able = [c for c in entrants if needed(c, batch) <= length]
            if len(able) >= number:
                return able[:number], length
        return [], 0


def race(bench: Bench, entrants: Sequence[Contender], allowance: Allowance, score: Score) -> Race | None:
    """Halve the entrants, the best guess first among them; None if there is no room, or nothing to learn."""
    first = [bench.run(SINGLE, allowance.first(), bench.seed)]
    inside, samples = allowance.rest(entrants, bench.task.batch, first[0])
    if not inside:
        return None
    first += [bench.run(SINGLE, samples, bench.seed + k) for k in range(1, SEEDS)]
    curves = [trial.curve for trial in first if trial.curve]
    baseline = Baseline.of(curves) if curves else None
    if baseline is None:
        return None
    ratios = [log_ratios(curve, baseline, capped=False) for curve in curves]
    apart = [fmean(each) for each in ratios if each]
    spread = stdev(apart) if len(apart) > 1 else 0.0
    done = halve(inside, samples, partial(_try, bench, baseline=baseline, spread=spread), score)
    whole = sum(trial.samples for trial in first)
    seconds = sum(trial.seconds for trial in first) / whole
    alone = Tried(SINGLE, Estimate(1.0, 1.0, 1.0), seconds, 0.0, samples, SEEDS)
    return Race(baseline, [alone, *done], spread)


def halve(
    left: list[Contender],
    samples: int,
    attempt: Callable[[Contender, int, int], Tried],
    score: Score,
) -> list[Tried]:
    """What the last round of each has shown, the best first."""
    done: list[Tried] = []
    for number in range(ROUNDS):
        length, is_last = samples // 2 ** (ROUNDS - 1 - number), number == ROUNDS - 1
        rows = [attempt(contender, length, SEEDS if is_last else 1) for contender in left]
        rows.sort(key=lambda row: score(row.contender, row.ratio.value))
        keep = len(rows) if is_last else -(-len(rows) // 2)
        rows = [replace(row, given_up=not is_last) for row in rows]
        done = [*rows, *[row for row in done if row.contender not in left]]
        left = [row.contender for row in rows[:keep] if isfinite(row.ratio.value)]
    return done


def _try(
    bench: Bench, contender: Contender, samples: int, seeds: int, *, baseline: Baseline, spread: float
) -> Tried:
    trials = [bench.run(contender, samples, bench.seed + k) for k in range(seeds)]
    good = [trial for trial in trials if not trial.diverged]
    ratio = ratio_of([trial.curve for trial in good], baseline, spread)
    trained = sum(trial.samples for trial in good) or 1
    seconds, nbytes = sum(trial.seconds for trial in good), sum(trial.nbytes for trial in good)
    return Tried(contender, ratio, seconds / trained, nbytes / trained, samples, len(good))


def _runs(entrants: int) -> float:
    """How many of the longest short runs a race of so many costs: the last round, and one worker, twice."""
    last = ROUNDS - 1
    each = [
        max(1, -(-entrants // 2**k)) / 2 ** (last - k) * (SEEDS if k == last else 1) for k in range(ROUNDS)
    ]
    return float(SEEDS + sum(each))
