"""Decentralised asynchronous SGD: everyone sends what it learnt to all, and waits for nobody (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.transport import Message
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Sends

NEWS = "news"
"""Tag of a gradient, as the codec wrote it."""


@dataclass(frozen=True)
class Strom(Decentral):
    """Every model takes every gradient that arrives, at its sender's rate; no server, no barrier.

    Made for the codec 'threshold', which sends a gradient's large elements and keeps the rest for later.
    """

    sends = Sends.GRADIENTS
    plain_sgd_only = True
    default_codec = "threshold"

    help: bool = True  # who is done does batches of those who are behind

    def steps_per_update(self, workers: int) -> float:
        return 1  # every model takes everyone's steps

    async def worker(self, w: Node) -> None:
        if w.t and not w.incarnation:
            await self._resume(w)
        lead, crew = _lead(w), _crew(w)
        async for _ in w.rounds(helps=self.help):
            self._take_all(w)
            g = await w.grad()
            others = w.others
            changes = 2 * w.deaths - (w.size - 1 - len(others))  # deaths and returns
            if changes != int(crew):
                lead.zero_()  # what a dead worker sent stays, and who is back begins with another's model
                crew.fill_(changes)
            payload = w.encode(NEWS, g, times=len(others))
            for k in others:
                await w.send(k, Message(NEWS, payload, rate=w.lr))
            step = w.decode(payload)  # its own as the others have it
            w.x.sub_(step, alpha=w.lr)
            lead.sub_(step, alpha=w.lr * (w.size - 1))

    async def finish(self, w: Node) -> None:
        async def take(m: Message) -> None:
            self._take(w, m)

        await w.part({NEWS: take})  # as it comes, while others go on
        self._take_all(w)  # who parts has sent all before
        await self.meet(w)

    async def _resume(self, w: Node) -> None:
        """Begin with the mean of all leads: it has every gradient up to here once.

        With the mean of all models where one saved before a death or a return, and another after it.
        """
        lead, wide = _lead(w), torch.promote_types(w.x.dtype, torch.float32)
        changes = _crew(w).to(w.x.device, wide)
        own = torch.cat((w.x + lead, w.x, changes, changes**2))
        common = await w.average(own)
        if common is not own:  # else somebody has gone meanwhile
            mean, square = common[-2:].tolist()
            w.x.copy_(common[: len(w.x)] if square == mean**2 else common[len(w.x) : -2])
        lead.zero_()

    def _take_all(self, w: Node) -> None:
        for m in w.poll(NEWS):
            self._take(w, m)

    def _take(self, w: Node, m: Message) -> None:
        step = w.decode(m.parts)
        w.x.sub_(step, alpha=m.rate)
        _lead(w).add_(step, alpha=m.rate)


def _lead(w: Node) -> Tensor:
    """What added to a worker's model makes its lead: the mean of these has what each did up to now once.

    A worker multiplies its own steps there, and takes back those of others: they may have made them after
    they had saved, and some that they had made before may not have come yet.
    """
    return w.keep("lead", torch.zeros_like(w.x), mutual=True)


def _crew(w: Node) -> Tensor:
    """How many deaths and returns there were before leads began to count."""
    return w.keep("crew", torch.zeros(1, dtype=torch.int64), mutual=True)
