"""Sums by recursive doubling (butterfly): in every round, neighbours on a hypercube swap their partial sums.

After round j, groups of 2^j workers hold the same sum. Both partners add the same two vectors, and a + b
equals b + a to the last bit, so all workers end with the same bits. It takes log2 P rounds, each with the
whole vector.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.cube import Cube, fold, fold_cost
from shoal.collectives.exchange import Dense, Load
from shoal.collectives.link import LinkCost
from shoal.engine.group import Group


async def butterfly(group: Group, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    await swap(group, Dense(group, v))


async def swap(group: Group, load: Load) -> None:
    """Sum the loads of all workers, so that every worker holds the sum."""

    async def over(cube: Cube) -> None:
        corner = cube.corner_of(group.rank)
        for bit in cube.bits:
            partner = cube.worker_at(corner ^ bit)
            await load.give(partner, "swap")
            await load.add(partner, "swap")

    await fold(group, load, over)


def cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Predicted seconds: log2 P (L + n G), log2 P rounded down, and folding. Additions are not counted."""
    return len(Cube(workers).bits) * link.seconds(nbytes) + fold_cost(workers, nbytes, link)
