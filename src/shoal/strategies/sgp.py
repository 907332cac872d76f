"""Stochastic gradient push: averages over one-way graphs, by push-sum (Assran et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import at_least
from shoal.core.transport import Message
from shoal.topologies import Topology, circle, named
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting


@dataclass(frozen=True)
class SGP(Decentral):
    """Everyone gives equal shares of its model and of its weight away; the model divided by the weight is z.

    Weights follow every unevenness of the graph, so that z tends to the mean where the model alone would not.
    """

    in_rounds = True

    topology: str = "one_peer"
    overlap: int = 0  # tau: steps that a share may be late before it is waited for

    def __post_init__(self) -> None:
        named(self.topology)
        at_least(0, overlap=self.overlap)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        named(self.topology).check(setting.workers)

    async def worker(self, w: Node) -> None:
        graph, first = named(self.topology), w.t
        biased, weight = _mass(w)
        peers = _Peers(graph, w)
        async for t in w.rounds():
            g = await w.grad()
            peers.look()
            if peers.has_missed_one:  # weight may be lost: at x, lr / w would be too long a step for z
                w.descend(g)
                w.x *= float(weight)
            else:
                w.x.copy_(biased)
                w.descend(g)  # the gradient is taken at z, and moves x
            out = graph.out_of(w.rank, w.size, t)
            present = w.here(out)
            p, inside = 1 / (len(out) + 1), peers.inside(present)
            await w.give(t, inside, w.x * p, count=float(weight) * p)
            await w.give(t, [k for k in present if k not in inside])  # nothing, so that they need not wait
            kept = 1 - p * len(inside)  # the other shares stay here
            torch.mul(w.x, kept, out=biased)
            weight *= kept
            due = t - self.overlap
            for r in range(max(first, due), t + 1):
                for k in graph.into(w.rank, w.size, r):
                    m = await w.take(r, k, wait=r == due)
                    if m is not None:
                        peers.note(k, r, m)
                        _add(m, biased, weight)
            for m in w.take_late(due):
                _add(m, biased, weight)
            torch.div(biased, float(weight), out=w.x)
            if due >= first:
                peers.expect(graph.into(w.rank, w.size, due), due)

    async def finish(self, w: Node) -> None:
        biased, weight = _mass(w)
        for m in await w.part():
            _add(m, biased, weight)
        wide = torch.promote_types(biased.dtype, torch.float32)
        total = await w.average(torch.cat((biased.to(wide), weight.to(biased.device, wide))))
        w.x.copy_(total[:-1] / total[-1])  # the sum of all x over that of all w: more than the mean of z

    def share(self, w: Node) -> dict[str, Tensor]:
        """z: one that is back may ask while this worker waits for shares, when its model is still x."""
        biased, weight = _mass(w)
        return {"x": biased / float(weight)}

    def take_share(self, w: Node, share: Mapping[str, Tensor]) -> None:
        super().take_share(w, share)
        biased, weight = _mass(w)
        biased.copy_(w.x)
        weight.fill_(1.0)


class _Peers:
    """The others, as far as shares can come back from them, past workers that have gone or are done.

    A worker that has missed none gives to all. Then it gives to those alone from whom shares can come back:
    or its weight would tend to 0.
    """

    def __init__(self, graph: Topology, w: Node) -> None:
        self._graph, self._w = graph, w
        self._missed = w.keep("missed", torch.tensor([float(w.incarnation > 0)]))  # who is back has, itself
        self._heard: dict[int, int] = {}  # sender -> the last round that it has sent something for
        self._apart: set[int] = set()  # senders that know no way from here back to them
        self._away: set[int] | None = None  # the workers without whom `_circle` was found
        self._circle: set[int] = set()

    @property
    def has_missed_one(self) -> bool:
        """Whether another has ever been missing, as far as this worker could see."""
        return bool(self._missed)

    def look(self) -> None:
        """See whether all are there."""
        if len(self._w.others) < self._w.size - 1:
            self._missed.fill_(1)

    def note(self, k: int, t: int, m: Message) -> None:
        """Something came for round `t`. If it is no share, the sender has missed one and sees no way back."""
        self._heard[k] = t
        if m.parts:
            self._apart.discard(k)
        else:
            self._apart.add(k)
            self._missed.fill_(1)

    def expect(self, sources: list[int], t: int) -> None:
        """See whether one of these has sent nothing for round `t`, being done or gone."""
        silent = [k for k in sources if self._heard.get(k, -1) < t]
        if len(self._w.here(silent)) < len(silent):
            self._missed.fill_(1)

    def inside(self, ranks: list[int]) -> list[int]:
        """Those of them from whom a share can come back."""
        if not self.has_missed_one:
            return ranks
        w = self._w
        away = set(range(w.size)).difference(w.here(range(w.size))) | self._apart
        if away != self._away:
            self._away, self._circle = away, circle(self._graph, w.rank, w.size, away)
        return [k for k in ranks if k in self._circle]


def _add(m: Message, biased: Tensor, weight: Tensor) -> None:
    """Take a share in; a message without one says that none comes."""
    if m.parts:
        biased += m.body
        weight += m.count


def _mass(w: Node) -> tuple[Tensor, Tensor]:
    """x and w; what the model itself holds is z = x / w. Who is back brings a weight of 1, as at first."""
    return w.keep("biased", w.x), w.keep("weight", torch.ones(1, dtype=torch.float64))
