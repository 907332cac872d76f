"""Regularised (ageing) evolution (Real et al. 2019): the best of a sample has a child, the oldest dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.limits import at_least
from shoal.search.searcher import Searcher, SearchMethod, SearchTrial, Wish
from shoal.search.space import Space


@dataclass(frozen=True)
class Evolution(SearchMethod):
    """A queue of `population` models; the best of `sample` drawn with replacement has a mutated child.

    The child trains for `length` epochs and joins the queue, and the oldest leaves it, even if it is the
    best. Every model is trained from fresh weights.
    """

    population: int = 10  # P
    sample: int = 5  # S
    length: int = 2

    def __post_init__(self) -> None:
        at_least(1, population=self.population, sample=self.sample, length=self.length)

    @property
    def least(self) -> int:
        return (self.population + 1) * self.length

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _AgeingSearcher(self, space, epochs, seed)


class _AgeingSearcher(Searcher):
    def __init__(self, method: Evolution, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method
        self._queue: deque[int] = deque()  # trials, the oldest first
        self._heard_of = 0

    def _next(self) -> Wish | None:
        if len(self.trials) < self._method.population:
            return self._fresh(self._method.length)
        if self._heard_of < self._method.population:
            return None  # the first generation is not complete
        rng = self.rng("child", len(self.trials))
        drawn = [self.trials[rng.choice(self._queue)] for _ in range(self._method.sample)]
        parent = winner(drawn)
        return Wish(self.space.mutate(parent.values, rng), self._method.length, parent=parent.number)

    def _heard(self, trial: SearchTrial) -> None:
        self._heard_of += 1
        self._queue.append(trial.number)
        if len(self._queue) > self._method.population:
            self._queue.popleft()

    def _own_state(self) -> dict[str, Any]:
        return {"queue": list(self._queue)}


def winner(drawn: Sequence[SearchTrial]) -> SearchTrial:
    """The trial with the best score; of equals the one that was drawn first."""
    best = drawn[0]
    for trial in drawn[1:]:
        if (trial.score or 0.0) > (best.score or 0.0):
            best = trial
    return best
