"""Gathering: gradients that a server adds up until there is a step to make, and who waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import torch
from torch import Tensor

from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push, RolledBack
from shoal.vocabulary.node import Node


class Gathering:
    """The round that a server is in. Whoever has given to it is answered when it is over."""

    def __init__(self, s: Node) -> None:
        self._node = s
        wide = torch.promote_types(s.x.dtype, torch.float32)  # a sum in half precision overflows
        self._total = s.keep("total", torch.zeros_like(s.x, dtype=wide))
        self._tally = s.keep("tally", torch.zeros(3, dtype=torch.float64))  # gradients, samples, rates
        self._gave = s.keep("gave", torch.zeros(s.engine.identity.nodes, dtype=torch.bool))
        self._waiting: dict[int, Message] = {}

    def __len__(self) -> int:
        """How many gradients are in."""
        return int(self._tally[0])

    @property
    def givers(self) -> int:
        """How many nodes have given to this round, and wait for its end."""
        return int(self._gave.sum())

    def has(self, rank: int) -> bool:
        """Whether that node is one of them."""
        return bool(self._gave[rank])

    def lacks(self, ranks: Iterable[int]) -> bool:
        """Whether one of these has still to give."""
        return not all(self.has(rank) for rank in ranks)

    async def inbox(self) -> AsyncIterator[Message]:
        """What `Node.inbox` brings. Pulls are answered here, once the caller has dealt with the message."""
        s = self._node
        async for m in s.inbox():
            if isinstance(m, Pull):
                self._waiting[m.src] = m
            elif isinstance(m, RolledBack):  # those who gave may wait elsewhere for those who think they did
                self._gave.zero_()
            yield m
            for rank in [rank for rank in self._waiting if not self.has(rank)]:
                await s.reply(self._waiting.pop(rank), s.x)

    def add(self, m: Push, rate: float, *, waits: bool = True) -> None:
        """Take in the gradient of a push, at its rate and weighted by the samples behind it."""
        if len(self) == 0:  # what is there is the last step
            self._total.zero_()
        weight = rate * m.count
        self._total.add_(m.body, alpha=weight)
        self._tally += torch.tensor([1.0, m.count, weight], dtype=torch.float64)
        self._gave[m.src] = waits

    def drop(self) -> None:
        """Count a gradient that came too late to be used."""
        self._node.engine.meter.dropped += 1

    def close(self) -> tuple[Tensor, float, float]:
        """The mean step, there until the next gradient; the rate in it; the samples behind it.

        These may be none, where mixed precision overflowed everywhere: then the step is zero.
        """
        _, samples, rates = self._tally.tolist()
        self._tally.zero_()
        self._gave.zero_()
        return self._total.div_(samples or 1.0), rates / (samples or 1.0), samples

    def descend(self) -> None:
        """Close the round with a step of this server's own."""
        step, _, samples = self.close()
        self._node.x.sub_(step)
        self._node.advance(samples)
