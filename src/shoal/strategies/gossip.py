"""Gossiping SGD: now and then everyone asks a random other for its model (Jin et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.limits import at_least
from shoal.core.transport import Message
from shoal.topologies import named
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting


@dataclass(frozen=True)
class Gossip(Decentral):
    """After a local step, the mean with the model of one neighbour, which answers while it computes."""

    period: int = 1  # local steps between two questions
    topology: str = "complete"  # whom a worker may ask
    help: bool = True  # who is done does batches of those who are behind

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        named(self.topology)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        named(self.topology).check(setting.workers)

    async def worker(self, w: Node) -> None:
        graph = named(self.topology)

        async def tell(m: Message) -> None:
            await w.send(m.src, Message("model", (w.x,), seq=m.seq))

        async for t in w.rounds({"ask": tell}, self.help):
            await w.step()
            if (t + 1) % self.period == 0:
                peer = w.draw(graph.out_of(w.rank, w.size, t))
                if peer is not None:
                    await w.send(peer, Message("ask", seq=t))
                    theirs = await w.hear("model", peer)
                    if theirs is not None:
                        w.x.add_(theirs.body).mul_(0.5)
