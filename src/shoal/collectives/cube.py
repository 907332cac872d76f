"""Cube: the workers as corners of a hypercube, where numbers that differ in one bit are neighbours.

A cube has a power of two corners. The r workers that are too many for it are folded in: of the first 2 r
workers, each odd one gives its vector to the even one before it, and gets the sum in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.collectives.exchange import Load
from shoal.collectives.link import LinkCost
from shoal.engine.group import Group


@dataclass(frozen=True)
class Cube:
    """The largest cube that so many workers fill."""

    workers: int

    @property
    def bits(self) -> list[int]:
        """1, 2, 4 and so on: what the numbers of a corner's neighbours differ in."""
        return [1 << j for j in range(self.workers.bit_length() - 1)]

    @property
    def corners(self) -> int:
        """The largest power of two that is not above the number of workers."""
        return 1 << len(self.bits)

    @property
    def folded(self) -> int:
        """How many workers have no corner of their own."""
        return self.workers - self.corners

    def corner_of(self, rank: int) -> int:
        """The corner of a worker that has one."""
        return rank // 2 if rank < 2 * self.folded else rank - self.folded

    def worker_at(self, corner: int) -> int:
        """The worker at a corner."""
        return 2 * corner if corner < self.folded else corner + self.folded


async def fold(group: Group, load: Load, add_up: Callable[[Cube], Awaitable[None]]) -> None:
    """Sum what the workers bring by an algorithm that wants a power of two of them."""
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
    """Seconds that folding adds: 2 (L + n G) unless the number of workers is a power of two."""
    return 2 * link.seconds(nbytes) if Cube(workers).folded else 0.0
