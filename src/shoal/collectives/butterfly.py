"""Sums in a butterfly, or by recursive doubling: in every round, neighbours on a cube swap what they have.

After round j, groups of 2^j workers hold the same sum. Both partners add the same two vectors, and a + b is
b + a to the last bit, so by induction all have the same bits in the end. log2 P rounds of the whole vector.
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
    """Have every worker hold the sum of what all bring."""

    async def over(cube: Cube) -> None:
        corner = cube.corner_of(group.rank)
        for bit in cube.bits:
            partner = cube.worker_at(corner ^ bit)
            await load.give(partner, "swap")
            await load.add(partner, "swap")

    await fold(group, load, over)


def cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Seconds that it takes: log2 P (L + n G), log2 P rounded down, and folding.

    Additions are not counted.
    """
    return len(Cube(workers).bits) * link.seconds(nbytes) + fold_cost(workers, nbytes, link)
