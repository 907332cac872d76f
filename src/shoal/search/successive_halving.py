"""Asynchronous successive halving, ASHA (Li et al. 2020): many short trials, and more epochs for the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.core.limits import at_least
from shoal.search.searcher import FAILED, Searcher, SearchMethod, SearchTrial, Wish
from shoal.search.space import Space


@dataclass(frozen=True)
class ASHA(SearchMethod):
    """Trials climb rungs of `first`, `first * reduction`, … epochs, up to `longest`.

    A free slot promotes a trial that is among the best 1 / `reduction` of its rung, from the highest rung
    down; if there is none, it starts a new trial. Trials that are never promoted have stopped early.
    """

    first: int = 1  # r
    longest: int = 16  # R
    reduction: int = 4  # eta

    def __post_init__(self) -> None:
        at_least(1, first=self.first, longest=self.longest)
        at_least(2, reduction=self.reduction)
        if self.longest < self.first:
            raise ValueError(f"longest={self.longest} is below first={self.first}, the lowest rung")

    @property
    def rungs(self) -> list[int]:
        """The epochs of each rung."""
        rungs = [self.first]
        while rungs[-1] * self.reduction <= self.longest:
            rungs.append(rungs[-1] * self.reduction)
        return rungs

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _ASHASearcher(self, space, epochs, seed)


class _ASHASearcher(Searcher):
    def __init__(self, method: ASHA, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method
        self._rungs = method.rungs
        self._results: list[list[tuple[float, int]]] = [[] for _ in self._rungs]  # score, trial

    def _next(self) -> Wish | None:
        for rung in reversed(range(len(self._rungs) - 1)):
            end = self._rungs[rung + 1]
            for trial in self._promotable(rung):
                if self.affords(end - trial.epochs):
                    return Wish(trial.values, end, trial.number, trial.epochs, trial.piece)
        return self._fresh(self._rungs[0])

    def _heard(self, trial: SearchTrial) -> None:
        assert trial.score is not None
        self._results[self._rungs.index(trial.epochs)].append((trial.score, trial.number))

    def _promotable(self, rung: int) -> list[SearchTrial]:
        """The best of a rung that have not gone on, best first."""
        results = self._results[rung]
        best = sorted(results, key=lambda result: (-result[0], result[1]))
        top = [self.trials[number] for score, number in best[: len(results) // self._method.reduction]]
        return [
            trial
            for trial in top
            if trial.epochs == self._rungs[rung] and trial.pending is None and trial.score != FAILED
        ]

    def _kept(self) -> set[int]:
        climbing = (trial for trial in self.trials if trial.epochs < self._rungs[-1])
        return {trial.piece for trial in climbing if trial.piece is not None}

    def _own_state(self) -> dict[str, Any]:
        return {"rungs": self._results}
