"""Cube: the workers as corners of a hypercube. Corners whose numbers differ in one bit are neighbours.

The number of corners is a power of two. The r workers beyond it are folded in: of the first 2 r workers, each
odd one gives its vector to the even one before it, and receives the sum at the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from shoal.collectives.exchange import Load
from shoal.collectives.link import LinkCost
from shoal.engine.group import Group


@dataclass(frozen=True)
class Cube:
    """The largest hypercube that `workers` can fill."""

    workers: int

    @cached_property
    def bits(self) -> list[int]:
        """1, 2, 4 and so on, one for each dimension: corner ^ bit is a neighbour."""
        return [1 << j for j in range(self.workers.bit_length() - 1)]

    @cached_property
    def corners(self) -> int:
        """The number of corners: the largest power of two up to the number of workers."""
        return 1 << len(self.bits)

    @cached_property
    def folded(self) -> int:
        """The number of workers without a corner."""
        return self.workers - self.corners

    def corner_of(self, rank: int) -> int:
        """The corner of worker `rank`, which must have one."""
        return rank // 2 if rank < 2 * self.folded else rank - self.folded

    def worker_at(self, corner: int) -> int:
        """The worker at a corner."""
        return 2 * corner if corner < self.folded else corner + self.folded


async def fold(group: Group, load: Load, add_up: Callable[[Cube], Awaitable[None]]) -> None:
    """Sum the loads of any number of workers by `add_up`, an algorithm for the corners of a cube."""
    cube = Cube(group.size)
    is_paired = group.rank < 2 * cube.folded
    if is_paired and group.rank % 2:
        await load.give(group.rank - 1, "fold")
        await load.replace(group.rank - 1, "unfold")
        return
    if is_paired:
        await load.add(group.rank + 1, "fold")
    await add_up(cube)
    if is_paired:
        await load.give(group.rank + 1, "unfold")


def fold_cost(workers: int, nbytes: float, link: LinkCost) -> float:
    """Predicted seconds of folding: 2 (L + n G), or 0 if the number of workers is a power of two."""
    return 2 * link.seconds(nbytes) if Cube(workers).folded else 0.0
