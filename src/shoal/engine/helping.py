"""Helping: among workers without a server, who is done takes over batches of those who are behind."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from shoal.core.transport import Message

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

HELP = "help"
"""Tag of the offer to do some of another worker's batches."""

HELPED = "helped"
"""Tag of the answer: whose share, the first place in it, the place after the last; or nothing."""

ASKED = 8
"""How many others a worker offers its help to before it is done."""


class Helping:
    """What a worker has given away of the end of its own share, and what it has taken over from others."""

    def __init__(self, node: Node) -> None:
        self.given = 0
        self.is_helping = False  # whether the batches that it does now are others'
        self.has_ended = False  # whether nobody has anything to give it any more
        self._node = node
        self._taken: deque[tuple[int, int, int]] = (
            deque()
        )  # whose share, first place, the place after the last

    async def answer(self, m: Message) -> None:
        """Give whoever offers help the later half of what is left to do here, beside the step at hand."""
        await self._node.send(m.src, Message(HELPED, (torch.tensor(self._half(), dtype=torch.int64),)))

    async def more(self) -> tuple[int, int, int] | None:
        """A batch that another worker would come to later: whose it is, its place there, the clock here.

        None when none of those asked has one to give: then this worker is where its whole share ends.
        """
        if not self._taken:
            await self._ask()
        if not self._taken:
            await self._come_to_the_end()
            return None
        owner, place, end = self._taken.popleft()
        if place + 1 < end:
            self._taken.appendleft((owner, place + 1, end))
        self.is_helping = True
        return owner, place, self._node.clock

    def _half(self) -> tuple[int, ...]:
        node = self._node
        if self._taken:
            owner, first, end = self._taken.pop()
            middle = (first + end) // 2
            if first < middle:
                self._taken.append((owner, first, middle))
            return owner, middle, end
        first, end = node.t + 1, (node.last_step or 0) - self.given
        if self.is_helping or first >= end:
            return ()
        middle = (first + end) // 2
        self.given += end - middle
        return node.rank, middle, end

    async def _ask(self) -> None:
        node = self._node
        others = sorted(node.working - {node.rank}, key=lambda k: (k - node.rank) % node.size)
        for k in others[:ASKED]:
            await node.send(k, Message(HELP))
            answer = await node.peers.hear(HELPED, k)
            if answer is not None and answer.body.numel():
                owner, first, end = answer.body.tolist()
                self._taken.append((owner, first, end))
                return

    async def _come_to_the_end(self) -> None:
        """Count the batches that others did as this worker's, and its own again from the next run on."""
        node = self._node
        assert node.last_step is not None, "it would not have come to the end of its share"
        if self.given or self.is_helping:
            node.t = node.clock = node.last_step
            node.replica.seek(node.rank, node.last_step)
        self.given, self.is_helping, self.has_ended = 0, False, True
        if node.boundary is not None:
            await node.boundary(node)
