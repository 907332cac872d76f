"""Sums in a binomial tree: up to worker 0, then down again.

In round j, every worker whose rank ends in a 1 followed by j zero bits gives its sum to the worker with that
1 cleared. The way down reverses the way up. Worker 0 takes part in all 2 log2 P rounds, and each round moves
the whole vector. Worker 0 completes the sum, so all workers get the same bits. The number of workers need not
be a power of two.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.exchange import give, take
from shoal.collectives.link import LinkCost
from shoal.engine.group import Group


async def tree(group: Group, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    parent, children = family(group.rank, group.size)
    for child in children:
        v.add_(await take(group, child, "tree-up", v))
    if parent is not None:
        await give(group, parent, "tree-up", v)
        v.copy_(await take(group, parent, "tree-down", v))
    for child in reversed(children):  # the largest subtree first
        await give(group, child, "tree-down", v)


def family(rank: int, workers: int) -> tuple[int | None, list[int]]:
    """A worker's parent, None for worker 0, and its children, the one with the smallest subtree first."""
    children: list[int] = []
    bit = 1
    while bit < workers:
        if rank & bit:
            return rank - bit, children
        if rank + bit < workers:
            children.append(rank + bit)
        bit <<= 1
    return None, children


def cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Predicted seconds: 2 log2 P (L + n G), log2 P rounded up. Additions are not counted."""
    return 2 * (workers - 1).bit_length() * link.seconds(nbytes)
