"""Reading a learning curve: the figures at its end with their spread, and the time to a given one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

Point = Mapping[str, Any]
"""An evaluation, as `record()["curve"]` holds it: seconds, samples, test_loss, test_accuracy, metrics."""

LAST = 3  # evaluations: one alone is as high or low as its last batches
LAST_PART = 0.2  # of the samples: earlier evaluations are of another model


@dataclass(frozen=True)
class Final:
    """A figure at the end of a run: the mean of the last evaluations and their standard deviation."""

    mean: float
    spread: float | None  # None for one evaluation
    evaluations: int

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 for one evaluation, whose noise is not known."""
        return (self.spread or 0.0) / math.sqrt(self.evaluations)


def final(curve: Sequence[Point], name: str) -> Final | None:
    """The figure over the last three evaluations, or those of them that are in the last fifth of the samples.

    None if the last evaluation has no such figure, or one that is not finite.
    """
    last = _number(curve[-1], "samples") if curve else None
    if last is None or _number(curve[-1], name) is None:
        return None
    late = [point for point in curve[-LAST:] if (_number(point, "samples") or 0.0) >= (1 - LAST_PART) * last]
    values = [value for point in late if (value := _number(point, name)) is not None]
    return Final(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def finals(curve: Sequence[Point]) -> dict[str, dict[str, float | int | None]]:
    """Every figure of the last evaluation as a `Final` in plain values, by name."""
    names = ("test_accuracy", "test_loss", *(curve[-1].get("metrics") or ())) if curve else ()
    found = {name: final(curve, name) for name in names}
    return {name: asdict(figure) for name, figure in found.items() if figure is not None}


def best(curve: Sequence[Point], name: str) -> float | None:
    """The best figure of all evaluations: the lowest loss, the highest of anything else."""
    values = [value for _, value in _evaluations(curve, name)]
    if not values:
        return None
    return min(values) if is_loss(name) else max(values)


def seconds_to(curve: Sequence[Point], name: str, target: float) -> float | None:
    """The time of the first evaluation that is as good as `target`; None if there is none."""
    for seconds, value in _evaluations(curve, name):
        if value <= target if is_loss(name) else value >= target:
            return seconds
    return None


def is_loss(name: str) -> bool:
    """Whether less of this figure is better."""
    return name == "test_loss"


def _evaluations(curve: Sequence[Point], name: str) -> Iterator[tuple[float, float]]:
    """Time and figure of the evaluations that have both."""
    for point in curve:
        seconds, value = _number(point, "seconds"), _number(point, name)
        if seconds is not None and value is not None:
            yield seconds, value


def _number(point: Point, name: str) -> float | None:
    value = point.get(name, (point.get("metrics") or {}).get(name))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
