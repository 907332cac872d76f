"""Chooses the algorithm with the lowest predicted cost for a vector's size, the workers and the link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor

from shoal.collectives.average import Sum, averaging
from shoal.collectives.butterfly import butterfly
from shoal.collectives.butterfly import cost as butterfly_cost
from shoal.collectives.link import LinkCost, measured
from shoal.collectives.rabenseifner import cost as rabenseifner_cost
from shoal.collectives.rabenseifner import rabenseifner
from shoal.collectives.ring import cost as ring_cost
from shoal.collectives.ring import ring
from shoal.collectives.stripes import stripes
from shoal.collectives.tree import cost as tree_cost
from shoal.collectives.tree import tree
from shoal.engine.group import Group, Mean

FEW_WORKERS = 8
"""Up to this number, workers average in stripes: no algorithm has fewer rounds, and messages are few."""

Cost: TypeAlias = Callable[[int, float, LinkCost], float]
"""(workers, bytes, link) -> seconds."""


@dataclass(frozen=True)
class Algorithm:
    """A way to sum over the workers, and its predicted cost."""

    sum: Sum
    cost: Cost


ALGORITHMS = {
    "butterfly": Algorithm(butterfly, butterfly_cost),
    "rabenseifner": Algorithm(rabenseifner, rabenseifner_cost),
    "ring": Algorithm(ring, ring_cost),
    "tree": Algorithm(tree, tree_cost),
}


@lru_cache
def cheapest(workers: int, nbytes: float, link: LinkCost) -> str:
    """The name of the algorithm that costs least; of equals, the first in ALGORITHMS."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name].cost(workers, nbytes, link))


class Cheapest:
    """Sums each vector by the algorithm that is cheapest for its size.

    Without `link`, the workers measure it together before the first sum.
    """

    def __init__(self, link: LinkCost | None = None) -> None:
        self._link = link

    async def __call__(self, group: Group, v: Tensor) -> None:
        link = self._link or await measured(group)
        await ALGORITHMS[cheapest(group.size, v.nbytes, link)].sum(group, v)


def automatic(workers: int, link: LinkCost | None = None) -> Mean:
    """The default collective over point-to-point messages, without a lossy codec."""
    return stripes if workers <= FEW_WORKERS else averaging(Cheapest(link))
