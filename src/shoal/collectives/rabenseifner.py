"""Sums by recursive halving, then recursive doubling (Rabenseifner 2004).

The vector is cut into as many parts as the cube has corners. In each round of the halving (a reduce-scatter),
neighbours swap halves of the range they are still responsible for, until each worker has the sum of one part.
In the doubling (an all-gather) they swap completed parts. That makes 2 log2 P rounds, but a worker sends only
2 n (P - 1) / P bytes. One worker completes the sum of each part, so all workers get the same bits.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shoal.collectives.cube import Cube, fold, fold_cost
from shoal.collectives.exchange import Dense, give, take
from shoal.collectives.link import LinkCost
from shoal.engine.group import Group


async def rabenseifner(group: Group, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    await fold(group, Dense(group, v), partial(_halve_and_double, group, v))


async def _halve_and_double(group: Group, v: Tensor, cube: Cube) -> None:
    corner, whole = cube.corner_of(group.rank), v.numel()
    for bit in reversed(cube.bits):
        partner = cube.worker_at(corner ^ bit)
        mine, theirs = v[block(whole, cube, corner, bit)], v[block(whole, cube, corner ^ bit, bit)]
        await give(group, partner, "halving", theirs, is_settled=True)  # until the partner gives it back
        mine.add_(await take(group, partner, "halving", mine))
    for bit in cube.bits:
        partner = cube.worker_at(corner ^ bit)
        mine, theirs = v[block(whole, cube, corner, bit)], v[block(whole, cube, corner ^ bit, bit)]
        await give(group, partner, "doubling", mine)
        theirs.copy_(await take(group, partner, "doubling", theirs))


def block(whole: int, cube: Cube, corner: int, width: int) -> slice:
    """The parts of this corner and of all corners whose numbers differ from it only in bits below `width`.

    Parts lie as `stripes.cut` has them; a list of them all would be long at each of a thousand workers.
    """
    first = corner & -width
    return slice(whole * first // cube.corners, whole * (first + width) // cube.corners)


def cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Predicted seconds: 2 L log2 P + 2 n G (P - 1) / P for the corners of the cube, and folding.

    Additions are not counted.
    """
    cube = Cube(workers)
    rounds = [link.seconds(nbytes * bit / cube.corners) for bit in cube.bits]
    return 2 * sum(rounds) + fold_cost(workers, nbytes, link)
