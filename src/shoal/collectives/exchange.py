"""The messages that two workers exchange for a sum.

Messages between two nodes arrive in the order in which they were sent, and all workers form the same sums in
the same order. So a tag per purpose is enough to tell messages apart: those of the next sum wait their turn.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.core.codec import expect
from shoal.core.transport import Message
from shoal.engine.group import Group


def give(group: Group, dst: int, tag: str, v: Tensor, is_settled: bool = False) -> Coroutine[Any, Any, None]:
    """Send `v` without compression. You may change `v` afterwards, unless it is settled until it is read."""
    return group.send(dst, Message(tag, (v,), is_settled=is_settled))


async def take(group: Group, src: int, tag: str, like: Tensor) -> Tensor:
    """Wait for the vector that `src` gives, of the dtype and length of `like`. Do not change it.

    Raises PeerLost as soon as any worker is lost, because the sum cannot be completed without it.
    """
    m = await group.take(tag, src)
    (v,) = expect(m.parts, (like.dtype, like.numel()))
    return v.to(like.device)


class Load(Protocol):
    """A worker's partial sum: at first its own vector."""

    async def give(self, dst: int, tag: str) -> None:
        """Send the partial sum to worker `dst`."""
        ...

    async def add(self, src: int, tag: str) -> None:
        """Add the partial sum that worker `src` gives."""
        ...

    async def replace(self, src: int, tag: str) -> None:
        """Replace the partial sum by that of worker `src`."""
        ...


@dataclass(frozen=True)
class Dense:
    """A load that is a dense vector, summed in place."""

    group: Group
    v: Tensor

    async def give(self, dst: int, tag: str) -> None:
        """Send the vector without compression."""
        await give(self.group, dst, tag, self.v)

    async def add(self, src: int, tag: str) -> None:
        """Add the vector that arrives. Both partners of a swap get the same bits: a + b equals b + a."""
        self.v.add_(await take(self.group, src, tag, self.v))

    async def replace(self, src: int, tag: str) -> None:
        """Copy the vector that arrives."""
        self.v.copy_(await take(self.group, src, tag, self.v))
