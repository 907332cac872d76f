"""A line search for the strong Wolfe conditions, as a generator of steps to try (Nocedal & Wright 2006, 3.5).

    search = strong_wolfe(loss, slope, first=1.0)
    step = next(search)                          # evaluate there, and tell what you found:
    step = search.send((loss_there, slope_there))  # ... until StopIteration brings a Found

Whoever drives it evaluates the loss: a function in a test, two thousand machines in a run.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import NamedTuple, TypeAlias

GROWTH = 2.0
"""How much longer the next step is while the loss still falls."""

MARGIN = 0.1
"""A trial keeps this share of the bracket away from both of its ends."""

Measured: TypeAlias = "tuple[float, float]"
"""The loss at a trial point, and its slope along the direction."""


class LinePoint(NamedTuple):
    """A point on the line: how far, the loss there, and its slope."""

    step: float
    loss: float
    slope: float


@dataclass(frozen=True)
class Wolfe:
    """The strong Wolfe conditions: enough less loss, and a slope that is flat enough."""

    decrease: float = 1e-4  # c1
    curvature: float = 0.9  # c2
    most: int = 25  # evaluations

    def falls(self, start: LinePoint, now: LinePoint) -> bool:
        """Whether the loss is low enough for a step of that length."""
        return now.loss <= start.loss + self.decrease * now.step * start.slope

    def is_flat(self, start: LinePoint, now: LinePoint) -> bool:
        """Whether the slope is flat enough."""
        return abs(now.slope) <= -self.curvature * start.slope


@dataclass(frozen=True)
class Found:
    """Where a search ended: `exact` if both conditions hold there, else the best that was seen."""

    point: LinePoint
    exact: bool
    evaluations: int


Search: TypeAlias = Generator[float, Measured, Found]


def strong_wolfe(loss: float, slope: float, first: float, rule: Wolfe | None = None) -> Search:
    """Yield the steps to try along a line on which the loss has this value and this slope at 0.

    The slope must be negative. A trial whose loss is not finite counts as too far. A step of 0 is found where
    no trial had less loss.
    """
    wolfe = rule or Wolfe()
    start = before = LinePoint(0.0, loss, slope)
    step = first
    for done in range(1, wolfe.most + 1):
        now = LinePoint(step, *(yield step))
        if not isfinite(now.loss) or not wolfe.falls(start, now) or (done > 1 and now.loss >= before.loss):
            return (yield from _zoom(wolfe, start, before, now, done))
        if wolfe.is_flat(start, now):
            return Found(now, True, done)
        if now.slope >= 0:
            return (yield from _zoom(wolfe, start, now, before, done))
        before, step = now, GROWTH * step
    return Found(before, False, wolfe.most)


def _zoom(wolfe: Wolfe, start: LinePoint, low: LinePoint, high: LinePoint, done: int) -> Search:
    """Between `low`, the best so far, and `high` there are steps for which both conditions hold."""
    while done < wolfe.most and low.step != high.step:
        step = between(low, high)
        if step in (low.step, high.step):  # the bracket is as narrow as numbers are
            break
        now = LinePoint(step, *(yield step))
        done += 1
        if not isfinite(now.loss) or not wolfe.falls(start, now) or now.loss >= low.loss:
            high = now
            continue
        if wolfe.is_flat(start, now):
            return Found(now, True, done)
        if now.slope * (high.step - low.step) >= 0:
            high = low
        low = now
    return Found(low, False, done)


def between(a: LinePoint, b: LinePoint) -> float:
    """The minimum of the cubic through two points and their slopes, kept off the ends of the bracket.

    The middle where there is no such minimum, or one end is not finite.
    """
    left, right = min(a.step, b.step), max(a.step, b.step)
    margin = MARGIN * (right - left)
    return min(max(_cubic_minimum(a, b), left + margin), right - margin)


def _cubic_minimum(a: LinePoint, b: LinePoint) -> float:
    middle = (a.step + b.step) / 2
    if not all(map(isfinite, (*a, *b))):
        return middle
    bend = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = bend * bend - a.slope * b.slope
    if not 0 <= square < inf:
        return middle
    root = sqrt(square) if b.step > a.step else -sqrt(square)
    below = b.slope - a.slope + 2 * root
    if below == 0:
        return middle
    found = b.step - (b.step - a.step) * (b.slope + root - bend) / below
    return found if isfinite(found) else middle
