"""Decentralised asynchronous SGD: everyone sends what it learnt to all, and waits for nobody (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

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
        async for _ in w.rounds(helps=self.help):
            self._take_all(w)
            g = await w.grad()
            others = w.others
            payload = w.encode(NEWS, g, times=len(others))
            for k in others:
                await w.send(k, Message(NEWS, payload, rate=w.lr))
            self._take(w, Message(NEWS, payload, rate=w.lr))  # its own as the others have it

    async def finish(self, w: Node) -> None:
        async def take(m: Message) -> None:
            self._take(w, m)

        await w.part({NEWS: take})  # as it comes, while others go on
        self._take_all(w)  # who parts has sent all before
        await self.meet(w)

    def _take_all(self, w: Node) -> None:
        for m in w.poll(NEWS):
            self._take(w, m)

    def _take(self, w: Node, m: Message) -> None:
        w.x.sub_(w.decode(m.parts), alpha=m.rate)
