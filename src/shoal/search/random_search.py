"""Random search (Bergstra & Bengio 2012): the baseline that every other method must beat."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.limits import at_least
from shoal.search.searcher import Searcher, SearchMethod, Wish
from shoal.search.space import Space


@dataclass(frozen=True)
class RandomSearch(SearchMethod):
    """Every trial draws its values from the priors and trains for `length` epochs."""

    length: int = 5

    def __post_init__(self) -> None:
        at_least(1, length=self.length)

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _RandomSearcher(self, space, epochs, seed)


class _RandomSearcher(Searcher):
    def __init__(self, method: RandomSearch, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method

    def _next(self) -> Wish | None:
        return self._fresh(self._method.length)
