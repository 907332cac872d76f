"""Hierarchical evolution (Liu et al. 2018): tournaments over cells made of motifs; nobody dies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.core.limits import above, at_least
from shoal.search.architectures import Cells
from shoal.search.evolution import winner
from shoal.search.searcher import Searcher, SearchMethod, SearchTrial, Wish
from shoal.search.space import Space


@dataclass(frozen=True)
class HierarchicalEvolution(SearchMethod):
    """Starts with `population` random architectures; then the winner of a tournament is mutated.

    A tournament is a share of all models so far, two at the least. Each model trains for `length` epochs from
    fresh weights, and none is removed. The space needs an architecture of "cells".
    """

    population: int = 10
    tournament: float = 0.05
    length: int = 2

    def __post_init__(self) -> None:
        at_least(1, population=self.population, length=self.length)
        above(0, tournament=self.tournament)
        if self.tournament > 1:
            raise ValueError(f"tournament={self.tournament} must be at most 1: it is a share of the models")

    def check(self, space: Space) -> None:
        if not isinstance(space.architecture, Cells):
            raise ValueError(
                "method 'hierarchical' evolves cells of motifs: add architecture = \"cells\" to the space, "
                "or take 'evolution'"
            )

    @property
    def least(self) -> int:
        return (self.population + 1) * self.length

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _TournamentSearcher(self, space, epochs, seed)


class _TournamentSearcher(Searcher):
    def __init__(self, method: HierarchicalEvolution, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method

    def _next(self) -> Wish | None:
        if len(self.trials) < self._method.population:
            return self._fresh(self._method.length)
        scored = [trial for trial in self.trials if trial.score is not None]
        if len(scored) < self._method.population:
            return None  # the first generation is not complete
        rng = self.rng("child", len(self.trials))
        parent = winner(self._tournament(scored))
        return Wish(self.space.mutate(parent.values, rng), self._method.length, parent=parent.number)

    def _tournament(self, scored: list[SearchTrial]) -> list[SearchTrial]:
        count = max(2, math.ceil(self._method.tournament * len(scored)))
        return self.rng("tournament", len(self.trials)).sample(scored, min(count, len(scored)))
