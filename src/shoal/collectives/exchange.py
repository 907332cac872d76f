"""What two workers hand each other on the way to a sum.

Messages between two nodes arrive in the order in which they were sent, and all workers go through the same
sums in the same order. So a tag that says what a message is for suffices: the next sum's messages wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.core.codec import expect
from shoal.core.transport import Message
from shoal.engine.group import Group


async def give(group: Group, dst: int, tag: str, v: Tensor) -> None:
    """Send `v`, exactly; it may be changed afterwards."""
    await group.send(dst, Message(tag, (v,)))


async def take(group: Group, src: int, tag: str, like: Tensor) -> Tensor:
    """What `src` gives: a vector of the dtype and length of `like`, to be read only.

    Raises PeerLost as soon as any worker is lost, for a sum that lacks one cannot be completed.
    """
    m = await group.take(tag, src)
    (v,) = expect(m.parts, (like.dtype, like.numel()))
    return v.to(like.device)


class Load(Protocol):
    """What a worker brings to a sum, and holds of it so far."""

    async def give(self, dst: int, tag: str) -> None:
        """Send it to a worker."""
        ...

    async def add(self, src: int, tag: str) -> None:
        """Add what a worker gives."""
        ...

    async def replace(self, src: int, tag: str) -> None:
        """Hold what a worker gives instead."""
        ...


@dataclass(frozen=True)
class Dense:
    """A load that is a whole vector, changed in place."""

    group: Group
    v: Tensor

    async def give(self, dst: int, tag: str) -> None:
        """Send it, exactly."""
        await give(self.group, dst, tag, self.v)

    async def add(self, src: int, tag: str) -> None:
        """Both partners of a swap do: a + b is b + a to the last bit."""
        self.v.add_(await take(self.group, src, tag, self.v))

    async def replace(self, src: int, tag: str) -> None:
        """Copy what arrives."""
        self.v.copy_(await take(self.group, src, tag, self.v))
