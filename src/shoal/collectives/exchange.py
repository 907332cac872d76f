"""Vectors that two workers hand each other on the way to a sum.

Messages between two nodes arrive in the order in which they were sent, and all workers go through the same
sums in the same order. So a tag that says what a message is for suffices: the next sum's messages wait.
"""

from __future__ import annotations

from torch import Tensor

from shoal.core.codec import expect
from shoal.core.node import Node
from shoal.core.transport import Message


async def give(node: Node, dst: int, tag: str, v: Tensor) -> None:
    """Send `v`, exactly; it may be changed afterwards."""
    await node.send(dst, Message(tag, (v,)))


async def take(node: Node, src: int, tag: str, like: Tensor) -> Tensor:
    """What `src` gives: a vector of the dtype and length of `like`, to be read only.

    Raises PeerLost as soon as any worker is lost, for a sum that lacks one cannot be completed.
    """
    m = await node.mailbox.find(tag, src, needed=range(node.size))
    (v,) = expect(m.parts, (like.dtype, like.numel()))
    return v.to(like.device)
