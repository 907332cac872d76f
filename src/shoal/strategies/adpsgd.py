"""AD-PSGD: pairs average while both compute, and nobody waits for a slow one (Lian et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.transport import Message
from shoal.topologies import Topology, both_ways, cut_off
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting

NOBODY = -1


@dataclass(frozen=True)
class ADPSGD(Decentral):
    """Workers of odd rank ask, those of even rank answer: both then hold the mean of the two models.

    A gradient is taken at the model as it was, and applied to what the others have made of it meanwhile.
    """

    keeps_changes = False  # the public model replaces them

    topology: str = "complete"  # only its edges between an odd and an even rank are used
    help: bool = True  # who is done does batches of those who are behind

    def __post_init__(self) -> None:
        both_ways(self.topology)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        graph, workers = both_ways(self.topology), setting.workers
        graph.check(workers)
        if graph.static and cut_off(lambda rank: _across(graph, rank, workers, 0), workers):
            raise ValueError(
                f"topology {self.topology!r} of {workers} workers falls apart if only edges between odd and "
                "even ranks count; take 'complete' or 'ring'"
            )

    async def worker(self, w: Node) -> None:
        graph, public, asked = both_ways(self.topology), self.solution(w), _asked(w)

        async def swap(m: Message) -> None:
            await w.send(m.src, Message("swapped", (public,), seq=m.seq))
            public.add_(m.body.to(public.device)).mul_(0.5)

        async for t in w.rounds({"swap": swap}, self.help):
            peer = w.draw(_across(graph, w.rank, w.size, t)) if w.rank % 2 else None
            if peer is not None:
                await w.send(peer, Message("swap", (public,), seq=t))
                asked.copy_(torch.tensor([peer, w.incarnation_of(peer)]))
            g = await w.grad()
            await self._hear(w)
            w.x.copy_(public)
            w.descend(g)
            public.copy_(w.x)

    def solution(self, node: Node) -> Tensor:
        return node.keep("public", node.x)

    async def finish(self, w: Node) -> None:
        await self._hear(w)  # the data may have ended in the middle of an exchange
        await super().finish(w)

    async def _hear(self, w: Node) -> None:
        """Complete the exchange with the peer that was asked, unless it has gone."""
        peer, incarnation = _asked(w).tolist()
        _asked(w).fill_(NOBODY)
        theirs = None if peer == NOBODY else await w.hear("swapped", peer, incarnation)
        if theirs is not None:
            self.solution(w).add_(theirs.body).mul_(0.5)


def _asked(w: Node) -> Tensor:
    """The peer whose answer is under way, and its incarnation."""
    return w.keep("asked", torch.tensor([NOBODY, NOBODY]))


def _across(graph: Topology, rank: int, workers: int, t: int) -> list[int]:
    """The neighbours of the other kind, who ask if one answers and answer if one asks."""
    return [k for k in graph.out_of(rank, workers, t) if (k + rank) % 2]
