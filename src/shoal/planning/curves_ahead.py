"""Learning curves of short runs, read beside that of one worker and continued.

What a setting costs in accuracy is one number: how many times as many samples it needs to a loss as one
worker does. That ratio is read off at each test of the later half of a short run. It falls as training goes
on, because the noise of gradients grows beside their mean, so that larger batches are of more use: 1 + B /
B_crit with a growing B_crit (McCandlish et al. 2018). What it exceeds 1 by is taken to fall with the cube
root of the samples. One worker's own curve is continued as a power law of the samples, which test losses
and error rates follow over several orders of magnitude (Hestness et al. 2017). What that gets wrong is
common to all settings, and does not change their order. docs/plan.md has both beside whole runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Any

INTERVAL = 1.645  # standard deviations to either side that hold 90 % of a normal distribution
CLOSE = 2  # successive tests are as good as one: they are of nearly the same model
LEAST_SPREAD = 0.03  # of a ratio, in logarithms: shorter runs than one's own are no exacter
LEARNT = 0.98  # of the first loss, before anything was learnt
EARLY = 0.2  # of the samples: the first tests are of a model that knows nothing
FALL = 1 / 3  # the power of the samples with which the excess of a ratio falls
FAR_DOUBT = 0.15  # standard deviation of a ratio, in logarithms, for every factor of ten that it is continued
MIDDLE = 0.75  # of a short run: where its ratio is read off, on average
MOST_DOUBT = log(1000)  # of a logarithm: a figure that may be a thousand times as large is not known
MOST_POWER = 600.0  # of e, in samples: more are no number of the machine
STEEPEST, FLATTEST = 2.0, 0.02  # exponents of a power law that a learning curve can have


@dataclass(frozen=True)
class Estimate:
    """A figure with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, far: float) -> Estimate:
        """A figure whose logarithm may be off by `far` either way; beyond MOST_DOUBT all are as unknown."""
        factor = exp(min(far, MOST_DOUBT))
        return cls(value, value / factor, value * factor)

    def times(self, factor: float) -> Estimate:
        """So many times the figure."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high)

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two may be equal."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(height) m^-slope, fitted to points, and how far off it may be."""

    height: float
    slope: float
    middle: float  # mean of log m
    points: int
    width: float  # sum of (log m - middle)^2
    residual: float  # standard deviation of log y

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> PowerLaw | None:
        """Through (m, y), all positive, without the first; None for fewer than three points."""
        known = [(log(m), log(y)) for m, y in points if m > 0 and y > 0 and isfinite(y)]
        late = [(m, y) for m, y in known if m >= known[-1][0] + log(EARLY)] if known else []
        if len(late) < 3:
            return None
        middle, mean = fmean(m for m, _ in late), fmean(y for _, y in late)
        width = sum((m - middle) ** 2 for m, _ in late)
        steep = -sum((m - middle) * (y - mean) for m, y in late) / width if width else 0.0
        slope = min(STEEPEST, max(FLATTEST, steep))
        off = sum((y - mean + slope * (m - middle)) ** 2 for m, y in late)
        return cls(mean + slope * middle, slope, middle, len(late), width, sqrt(off / (len(late) - 2)))

    def at(self, samples: float) -> Estimate:
        """y after so many samples."""
        value = exp(self.height - self.slope * log(max(samples, 1.0)))
        return Estimate.around(value, self._doubt(samples))

    def _doubt(self, samples: float) -> float:
        """How far log y may be off after so many samples."""
        away = log(max(samples, 1.0)) - self.middle
        doubt = self.residual * sqrt(1 / self.points + away**2 / self.width) if self.width else self.residual
        return INTERVAL * (1 + 1.5 / (self.points - 2)) * doubt

    def samples_to(self, y: float) -> float:
        """Samples until y has fallen so far; infinity if there is no such number."""
        power = (self.height - log(y)) / self.slope if y > 0 else inf
        return exp(power) if power < MOST_POWER else inf

    def samples_doubt(self, y: float) -> float:
        """How far the logarithm of that number may be off: the flatter the curve, the further."""
        samples = self.samples_to(y)
        return self._doubt(samples) / self.slope if isfinite(samples) else inf


@dataclass(frozen=True)
class Baseline:
    """The learning curve of one worker: (samples, loss), from the untrained model on, and its two laws.

    Of several seeds it is their mean.
    """

    points: Sequence[tuple[float, float]]
    loss: PowerLaw
    error: PowerLaw | None  # of the error rate in per cent; None where labels are not classes
    seeds: int = 1

    @classmethod
    def of(cls, curves: Sequence[Sequence[Mapping[str, Any]]]) -> Baseline | None:
        """From the learning curves of one or more seeds; None if they have too few tests."""
        losses = [[(float(p["samples"]), float(p["test_loss"])) for p in curve] for curve in curves]
        errors = [
            (float(p["samples"]), 100.0 - p["test_accuracy"])
            for curve in curves
            for p in curve
            if p.get("test_accuracy") is not None
        ]
        law = PowerLaw.fit(sorted(point for curve in losses for point in curve))
        if law is None:
            return None
        return cls(_falling(_mean(losses)), law, PowerLaw.fit(sorted(errors)), len(losses))

    @property
    def lowest(self) -> float:
        """The lowest loss that one worker has come to."""
        return self.points[-1][1]

    def samples_to(self, loss: float) -> float:
        """Samples that one worker needs to this loss: read off the curve, beyond it by the power law."""
        before, *_ = self.points
        for m, y in self.points[1:]:
            if y <= loss:
                share = (before[1] - loss) / (before[1] - y) if before[1] > y else 1.0
                return before[0] + min(1.0, max(0.0, share)) * (m - before[0])
            before = (m, y)
        last, lowest = self.points[-1]
        return last * exp(min(MOST_POWER, (log(lowest) - log(loss)) / self.loss.slope))


def _mean(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """At each test of the longest curve: the mean loss of all that come so far, straight between tests."""
    longest = max(curves, key=lambda curve: curve[-1][0] if curve else 0.0)
    return [(m, fmean(_at(curve, m) for curve in curves if curve and m <= curve[-1][0])) for m, _ in longest]


def _at(curve: Sequence[tuple[float, float]], samples: float) -> float:
    before = curve[0]
    for m, y in curve:
        if m >= samples:
            share = (samples - before[0]) / (m - before[0]) if m > before[0] else 1.0
            return before[1] + max(0.0, share) * (y - before[1])
        before = (m, y)
    return before[1]


def _falling(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest loss so far at each point."""
    lowest, found = inf, []
    for m, y in points:
        lowest = min(lowest, y)
        found.append((m, lowest))
    return found


def log_ratios(curve: Sequence[Mapping[str, Any]], baseline: Baseline, *, capped: bool = True) -> list[float]:
    """At each test of the later half: the logarithm of samples needed over those of one worker.

    Beyond the lowest loss of one worker nobody has seen how many that needs: `capped` takes as many there as
    the run, if the power law says more.
    None at all for a run that learnt nothing: whose loss is hardly below that of the untrained model.
    """
    last = float(curve[-1]["samples"]) if curve else 0.0
    found, lowest = [], inf
    if min((float(point["test_loss"]) for point in curve), default=inf) > LEARNT * baseline.points[0][1]:
        return []
    for point in curve:
        lowest = min(lowest, float(point["test_loss"]))
        if point["samples"] >= last / 2 and isfinite(lowest):
            ratio = log(point["samples"] / max(1.0, baseline.samples_to(lowest)))
            found.append(max(0.0, ratio) if capped and lowest < baseline.lowest else ratio)
    return found


def ratio_of(
    curves: Sequence[Sequence[Mapping[str, Any]]], baseline: Baseline, seed_spread: float
) -> Estimate:
    """Samples needed over those of one worker, from the curves of one or more seeds.

    Doubt comes from the tests of a run, which differ, from `seed_spread`, by which runs do and one worker's
    do, too, and from how far the ratio lies beyond what one worker has shown.
    """
    each = [log_ratios(curve, baseline) for curve in curves]
    known = [ratios for ratios in each if ratios]
    if not known:
        return Estimate(inf, inf, inf)
    means = [fmean(ratios) for ratios in known]
    within = max(stdev(r) / sqrt(max(1, len(r) / CLOSE)) if len(r) > 1 else seed_spread for r in known)
    between = max(seed_spread, LEAST_SPREAD, stdev(means) if len(means) > 1 else 0.0)
    runs = (within**2 + between**2) / len(known)
    far = INTERVAL * sqrt(runs + seed_spread**2 / baseline.seeds)
    seen = [
        fmean(log_ratios(curve, baseline, capped=False)) for curve, r in zip(curves, each, strict=True) if r
    ]
    far = hypot(far, fmean(means) - fmean(seen))
    return Estimate.around(exp(fmean(means)), far)


def continued(ratio: Estimate, trained: float, goal: float, *, own: bool = False) -> Estimate:
    """The ratio of a setting, from a run on `trained` samples, where one worker is after `goal` samples.

    `own`: where the setting itself is after so many.
    """
    if not isfinite(ratio.value) or goal <= 0:
        return ratio
    value, further = ratio.value, 1.0
    for _ in range(20):  # the setting is there after `value` times as many
        further = max(1.0, (1.0 if own else value) * goal / (MIDDLE * trained))
        value = 1 + (ratio.value - 1) * further**-FALL if ratio.value > 1 else ratio.value
    doubt = INTERVAL * FAR_DOUBT * log(further) / log(10)
    far = sqrt(log(ratio.high / ratio.value) ** 2 + doubt**2)
    return Estimate.around(value, far)
