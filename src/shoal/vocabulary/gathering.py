"""Gathering: gradients that a server adds up until there is a step to make, and who waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import torch

from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push, RolledBack
from shoal.vocabulary.node import Node


class Gathering:
    """The round that a server is in. Whoever has given to it is answered when it is over.

    A pull from before that is answered at once: one that was under way when a checkpoint was saved is asked
    again by a worker whose gradient this server has already, and another shard has not.
    """

    def __init__(self, s: Node) -> None:
        self._node = s
        wide = torch.promote_types(s.x.dtype, torch.float32)  # a sum in half precision overflows
        self._total = s.keep("total", torch.zeros_like(s.x, dtype=wide), shared=True)
        tallies = s.keep("tally", torch.zeros(1, 4, dtype=torch.float64), shared=True)
        self._tally = tallies[0]  # gradients, samples, weights, rates
        length = torch.tensor(0, dtype=torch.int64)
        self._length = s.keep("length", length, shared=True)  # of the newest push's numbers
        nobody = torch.zeros(s.engine.identity.nodes, dtype=torch.int64)
        self._gave = s.keep("gave", nobody)  # the request with which a node has given; 0: it has not
        self._waiting: dict[int, Message] = {}

    def __len__(self) -> int:
        """How many gradients are in."""
        return int(self._tally[0])

    @property
    def givers(self) -> int:
        """How many nodes have given to this round, and wait for its end."""
        return int(self._gave.count_nonzero())

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
            for rank in [rank for rank, m in self._waiting.items() if not 0 < self._gave[rank] < m.seq]:
                await s.reply(self._waiting.pop(rank), s.x)

    def add(self, m: Push, scale: float = 1.0, *, waits: bool = True) -> None:
        """Take in the gradient of a push, weighted by the samples behind it; its learning rate times `scale`.

        The first is kept as it came, so that a round of one makes exactly the step that its sender would.
        """
        weight = scale * m.count
        if len(self) == 0:
            self._total.copy_(m.body)
        else:
            if len(self) == 1:
                self._total.mul_(float(self._tally[2]))
                self._tally[3] *= self._tally[1]
            self._total.add_(m.body, alpha=weight)
        rate = m.count * m.rate if len(self) else m.rate
        self._tally += torch.tensor([1.0, m.count, weight, rate], dtype=torch.float64)
        self._length.fill_(0 if m.numbers is None else m.numbers.numel())
        if m.numbers is not None:
            self._node.keep(self._name, m.numbers[None], shared=True).copy_(m.numbers)
        self._gave[m.src] = m.seq if waits else 0

    @property
    def _name(self) -> str:
        """The variable that holds the newest numbers: those of two optimizers may have different lengths."""
        return f"{int(self._length)} numbers"

    def drop(self, m: Push) -> None:
        """Leave out a gradient that came too late to be used: its worker must say that it `may_drop`."""
        self._node.engine.service.drop(m)

    def close(self) -> tuple[Push, float]:
        """The mean gradient as a push of all the samples behind it, and the mean of the scales.

        Its learning rate is the mean, its other numbers are those of the newest push. There may be no samples
        behind it, where mixed precision overflowed everywhere.
        """
        s = self._node
        gradients, samples, weights, rates = self._tally.tolist()
        if gradients > 1:
            self._total.div_(weights or 1.0)
        parts = [self._total.to(s.x.dtype)]
        if self._length:
            parts.append(s.keep(self._name, torch.empty(1, 0), shared=True)[0])
        self._tally.zero_()
        self._gave.zero_()
        rate = rates / (samples or 1.0) if gradients > 1 else rates
        return Push(parts=tuple(parts), count=samples, rate=rate), weights / (samples or 1.0)

    def descend(self) -> None:
        """Close the round with a step of this server's own."""
        mean, scale = self.close()
        self._node.descend(mean.body, mean, scale)
        self._node.advance(mean.count)
