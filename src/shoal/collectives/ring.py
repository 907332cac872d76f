"""Ring all-reduce: each worker passes parts of the vector to the next one.

The vector is cut into P parts. In P - 1 steps each part goes once round the ring, and every worker adds its
own elements. In P - 1 more steps the completed parts go round and are copied. Each worker sends
2 n (P - 1) / P bytes, only to its neighbour. One worker completes the sum of each part, so all get the same
bits. The number of workers need not be a power of two.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.exchange import give, take
from shoal.collectives.link import LinkCost
from shoal.collectives.stripes import cut
from shoal.engine.group import Group


async def ring(group: Group, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    parts = [v[part] for part in cut(v.numel(), size)]
    for j in range(size - 1):
        mine, theirs = parts[(rank - j) % size], parts[(before - j) % size]
        await give(group, after, "ring-add", mine)
        theirs.add_(await take(group, before, "ring-add", theirs))
    for j in range(size - 1):  # part rank + 1 is complete here
        mine, theirs = parts[(after - j) % size], parts[(rank - j) % size]
        await give(group, after, "ring-copy", mine)
        theirs.copy_(await take(group, before, "ring-copy", theirs))


def cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Predicted seconds: 2 (P - 1) (L + n G / P). Additions are not counted."""
    return 2 * (workers - 1) * link.seconds(nbytes / workers)
