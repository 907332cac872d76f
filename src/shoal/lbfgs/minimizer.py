"""Minimizer: the iterations of L-BFGS, as a generator that asks for vector operations and for trials.

It holds numbers and names, no vector: whoever drives it has them, in one place or cut up among many.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import Any, NamedTuple, TypeAlias

from shoal.core.errors import Diverged
from shoal.lbfgs.line_search import Found, LinePoint, Search, Wolfe, strong_wolfe
from shoal.lbfgs.operations import AbsoluteSum, Combine, Dots, Operation
from shoal.lbfgs.recursion import Combination, Gram, Pair, two_loop

FLAT = 1e-10
"""A pair is left out if its curvature is below this: s.y <= FLAT |s| |y|."""

G = Combination.of("g")


@dataclass(frozen=True)
class TrialPoint:
    """Evaluate loss and gradient at x + step d, once these operations are done; the answer is a Measurement.

    The gradient stays in `new`. With `fresh` it is the next batch, where there are several.
    """

    step: float
    before: tuple[Operation, ...] = ()
    fresh: bool = False

    @property
    def operations(self) -> list[Operation]:
        """What the shards do before workers may pull the point."""
        along = ((self.step, "d"),) if self.step else ()
        return [*self.before, Combine("point", ((1.0, "x"), *along))]


class Measurement(NamedTuple):
    """What is known after a trial."""

    loss: float
    slope: float = nan  # new . d
    square: float = nan  # new . new
    across: float = nan  # new . g


Asked: TypeAlias = "TrialPoint | list[Operation]"
Program: TypeAlias = Generator[Asked, Any, str]


@dataclass
class Minimizer:
    """One minimization. `iteration` and `loss` tell how far it is.

    `program` yields lists of operations, and is sent the numbers that they return; and trials, and is sent
    a Measurement. Where no pass over the data is left for a trial, it is sent None once the operations of
    the trial are done. It returns why it ended, and leaves `last_operations` to do. With `rotates`, every
    iteration has a batch of its own.
    """

    history: int = 10
    wolfe: Wolfe = field(default_factory=Wolfe)
    tolerance: float = 1e-5
    iterations: int | None = None
    rotates: bool = False

    def __post_init__(self) -> None:
        self.iteration = 0
        self.loss = nan
        self._gram = Gram()
        self._slots: list[int] = []  # of the pairs, oldest first
        self._before: list[Operation] = []  # to be done with the next command
        self._last: tuple[float, float] | None = None  # step and slope of the last iteration
        self._latest = Measurement(nan)

    def program(self) -> Program:
        """Iterate until the gradient is small, no pass is left, or no step has less loss."""
        start: Measurement | None = yield TrialPoint(0.0)
        if start is None:
            return "no pass was left"
        if not isfinite(start.loss):
            raise Diverged(
                f"the loss is {start.loss} where training starts; look for inputs that are not finite"
            )
        self.loss = start.loss
        self._take(Combine("g", ((1.0, "new"),)))
        (size,) = yield self._with(AbsoluteSum("g"))
        shortest = min(1.0, 1.0 / size) if size else 1.0
        while self.iteration != self.iterations:
            if self.rotates and self.iteration and not (yield from self._next_batch()):
                return "no pass was left"
            yield from self._learn_products()
            square = self._gram.dot(G, G)
            if sqrt(square) <= self.tolerance:
                return "the gradient is small"
            direction = two_loop(G, self._pairs, self._gram.dot)
            slope = self._gram.dot(G, direction)
            if not slope < 0 and self._slots:
                self._forget_pairs()
                continue
            found = yield from self._search(direction, slope, self._first_step(slope, shortest))
            if found is None:
                return "no pass was left"
            if found.point.step:
                self._accept(found.point, direction, slope, square)
            elif self._slots:
                self._forget_pairs()
            else:
                return "no step has less loss"
        return "as many iterations as asked for"

    @property
    def last_operations(self) -> list[Operation]:
        """What is left to do when the program has ended: then x is the result, and is what workers pull."""
        return self._with(Combine("point", ((1.0, "x"),)))

    # -- inside --------------------------------------------------------------------------------

    @property
    def _pairs(self) -> list[Pair[Combination]]:
        return [Pair(Combination.of(f"s{k}"), Combination.of(f"y{k}")) for k in self._slots]

    def _take(self, *operations: Operation) -> None:
        """Have these done with the next command."""
        self._before += operations

    def _with(self, *operations: Operation) -> list[Operation]:
        """These operations, after those that were left for the next command."""
        before, self._before = self._before, []
        return [*before, *operations]

    def _learn_products(self) -> Generator[Asked, Any, None]:
        names = [*(name for k in self._slots for name in (f"s{k}", f"y{k}")), "g"]
        missing = self._gram.missing(names)
        if missing or self._before:
            values: Sequence[float] = yield self._with(Dots(tuple(missing)))
            self._gram.learn(missing, values)
        if self._slots and not self._is_curved(self._pairs[-1]):
            self._forget_pairs(self._slots[-1])

    def _is_curved(self, pair: Pair[Combination]) -> bool:
        """Whether the products of a pair as measured, not as the line search foretold, say so."""
        dot = self._gram.dot
        return dot(pair.s, pair.y) > FLAT * sqrt(dot(pair.s, pair.s) * dot(pair.y, pair.y))

    def _next_batch(self) -> Generator[Asked, Any, bool]:
        """Loss and gradient at x on the batch of this iteration."""
        there: Measurement | None = yield TrialPoint(0.0, tuple(self._with()), fresh=True)
        if there is None:
            return False
        if not isfinite(there.loss):
            raise Diverged(
                f"the loss is {there.loss} on the batch of iteration {self.iteration + 1}; look for inputs "
                "that are not finite, or take larger batches: more portions"
            )
        self.loss = there.loss
        self._take(Combine("g", ((1.0, "new"),)))
        self._gram.forget("g")
        return True

    def _first_step(self, slope: float, shortest: float) -> float:
        """1 once the curvature is known; else as far down as the last step went."""
        if self._slots:
            return 1.0
        if self._last is None:
            return shortest
        step, before = self._last
        return step * before / slope

    def _search(
        self, direction: Combination, slope: float, first: float
    ) -> Generator[Asked, Any, Found | None]:
        """Try steps until one is found, at which the last trial was; None where no pass is left."""
        self._take(Combine("d", tuple((factor, name) for name, factor in direction.factors.items())))
        start = best = LinePoint(0.0, self.loss, slope)
        search = strong_wolfe(self.loss, slope, first, self.wolfe)
        step = next(search)
        while True:
            there: Measurement | None = yield TrialPoint(step, tuple(self._with()))
            if there is None:
                if best.step:
                    self._take(Combine("x", ((1.0, "x"), (best.step, "d"))))
                self.loss = best.loss
                return None
            self._latest = there
            now = LinePoint(step, there.loss, there.slope)
            if isfinite(now.loss) and self.wolfe.falls(start, now) and now.loss < best.loss:
                best = now
            try:
                step = search.send((there.loss, there.slope))
            except StopIteration as end:
                found: Found = end.value
                if found.point.step in (0.0, now.step):
                    return found
                search = _again(found)  # the last trial was not the best, whose gradient is needed
                step = next(search)

    def _accept(self, to: LinePoint, direction: Combination, slope: float, square: float) -> None:
        """Go to the trial point, and remember the pair unless it says nothing of the curvature."""
        step, there = to.step, self._latest
        length = step * sqrt(max(0.0, self._gram.dot(direction, direction)))
        change = sqrt(max(0.0, there.square - 2 * there.across + square))
        product = step * (there.slope - slope)
        if self.history and product > FLAT * length * change:
            if len(self._slots) == self.history:
                self._slots.pop(0)
            slot = next(k for k in range(self.history) if k not in self._slots)
            self._slots.append(slot)
            self._gram.forget(f"s{slot}", f"y{slot}")
            self._take(Combine(f"s{slot}", ((step, "d"),)))
            self._take(Combine(f"y{slot}", ((1.0, "new"), (-1.0, "g"))))
        self._gram.forget("g")
        self._take(Combine("x", ((1.0, "point"),)), Combine("g", ((1.0, "new"),)))
        self._last = step, slope
        self.loss = there.loss
        self.iteration += 1

    def _forget_pairs(self, *slots: int) -> None:
        """Those in these slots, or all."""
        gone = slots or tuple(self._slots)
        self._gram.forget(*(name for k in gone for name in (f"s{k}", f"y{k}")))
        self._slots = [k for k in self._slots if k not in gone]


def _again(found: Found) -> Search:
    """A search that only has the point evaluated again that another one found."""
    yield found.point.step
    return found
