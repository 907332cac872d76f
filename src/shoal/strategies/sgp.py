"""Stochastic gradient push: averages over one-way graphs, by push-sum (Assran et al. 2019)."""

from __future__ import annotations

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
        circle = _Circle(graph, w)
        async for t in w.rounds():
            g = await w.grad()
            if circle.has_lost_one:  # and weight: at x, a step of z would be longer than the rate says
                w.descend(g)
                w.x *= float(weight)
            else:
                w.x.copy_(biased)
                w.descend(g)  # the gradient is taken at z, and moves x
            out = graph.out_of(w.rank, w.size, t)
            present = w.here(out)
            p, inside = 1 / (len(out) + 1), circle.inside(present)
            await w.give(t, inside, w.x * p, count=float(weight) * p)
            await w.give(t, [k for k in present if k not in inside])  # nothing, so that they need not wait
            kept = 1 - p * len(inside)  # the other shares stay here
            torch.mul(w.x, kept, out=biased)
            weight *= kept
            due = t - self.overlap
            for r in range(max(first, due), t + 1):  # earlier ones are in, or lost
                for k in graph.into(w.rank, w.size, r):
                    m = await w.take(r, k, wait=r == due)
                    if m is not None:
                        circle.heard[k] = r
                        _add(m, biased, weight)
            for m in w.take_late(due):
                _add(m, biased, weight)
            torch.div(biased, float(weight), out=w.x)
            circle.note(t, due, set(out).difference(present))

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


class _Circle:
    """Whom a worker gives shares: those from whom they can come back, past workers that take no part.

    Shares for others would never come back: the weight here would tend to 0, and the steps of z, which are
    those of x divided by it, would grow without end.
    """

    def __init__(self, graph: Topology, w: Node) -> None:
        self.heard: dict[int, int] = {}  # sender -> the last round whose share is in
        self.has_lost_one = False  # whether a neighbour ever took no part
        self._graph = graph
        self._w = w
        self._absent: set[int] = set()  # neighbours that took no part when it was their turn
        self._here: list[int] = []  # the workers for which `_members` was found
        self._members: set[int] = set()

    def inside(self, ranks: list[int]) -> list[int]:
        """Those of them that are in the circle: all, as long as no neighbour is absent."""
        if not self._absent:
            return ranks
        w = self._w
        here = w.here(range(w.size))
        if here != self._here:
            away = set(range(w.size)).difference(here)
            self._here, self._members = here, circle(self._graph, w.rank, w.size, away)
        return [k for k in ranks if k in self._members]

    def note(self, t: int, due: int, away: set[int]) -> None:
        """Note who was absent in round `t`.

        Those `away` could not be given a share, and of others the one that was `due` did not come.
        """
        w = self._w
        sources = [] if due < 0 else self._graph.into(w.rank, w.size, due)
        mute = [k for k in sources if self.heard.get(k, -1) < due]
        silent = away.union(mute).difference(w.here(mute))
        self._absent.difference_update(self._graph.out_of(w.rank, w.size, t), sources)
        self._absent |= silent
        self.has_lost_one = self.has_lost_one or bool(silent)


def _add(m: Message, biased: Tensor, weight: Tensor) -> None:
    """Take a share in; a message without one says that none comes."""
    if m.parts:
        biased += m.body
        weight += m.count


def _mass(w: Node) -> tuple[Tensor, Tensor]:
    """x and w; what the model itself holds is z = x / w. Who is back brings a weight of 1, as at first."""
    return w.keep("biased", w.x), w.keep("weight", torch.ones(1, dtype=torch.float64))
