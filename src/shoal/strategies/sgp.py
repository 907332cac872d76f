"""Stochastic gradient push: averages over one-way graphs, by push-sum (Assran et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import at_least
from shoal.core.transport import Message
from shoal.topologies import Topology, named, strongly_connected
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting


@dataclass(frozen=True)
class SGP(Decentral):
    """Everyone gives equal shares of its model and of its weight away; the model divided by the weight is z.

    Weights follow every unevenness of the graph, so that z tends to the mean where the model alone would not.
    """

    in_rounds = True
    keeps_changes = False  # its model is made anew of x, which the loop does not hold

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
        mass, ways = _Mass(w), _WaysBack(graph, w)
        if first and (self.overlap or mass.issue):  # resumed: shares under way are lost, deaths count anew
            mass.issue_anew(0)
        departed, all_came = 0, True  # as far as this worker knows
        async for t in w.rounds(takes_late=True):
            g = await w.grad()
            known = w.deaths + (len(w.done) if mass.issue or not all_came else 0)  # else nobody misses them
            if known > departed:
                departed = known
                mass.issue_anew(mass.issue + 1)
            w.x.copy_(mass.biased)
            w.descend(g)  # the gradient is taken at z, and moves x
            out = graph.out_of(w.rank, w.size, t)
            present = w.here(out)
            p, inside = 1 / (len(out) + 1), ways.lead_from(present) if mass.issue else present
            await w.give(t, inside, w.x * p, count=float(mass.weight) * p, version=mass.issue)
            await w.give(t, [k for k in present if k not in inside], version=mass.issue)  # no share comes
            mass.keep(w.x, 1 - p * len(inside))  # the other shares stay here
            due = t - self.overlap
            for late in w.take_late(due):
                mass.add(late)
            for r in range(max(first, due), t + 1):
                for k in graph.into(w.rank, w.size, r):
                    m = await w.take(r, k, wait=r == due)
                    if m is not None:
                        mass.add(m)
                    elif r == due and k not in w.here([k]):
                        all_came = False
            torch.div(mass.biased, float(mass.weight), out=w.x)

    async def finish(self, w: Node) -> None:
        mass = _Mass(w)
        for m in await w.part():
            mass.add(m)
        wide = torch.promote_types(mass.biased.dtype, torch.float32)
        total = await w.average(torch.cat((mass.biased.to(wide), mass.weight.to(mass.biased.device, wide))))
        w.x.copy_(total[:-1] / total[-1])  # the sum of all x over that of all w: more than the mean of z

    def share(self, w: Node) -> dict[str, Tensor]:
        """z: one that is back may ask while this worker waits for shares, when its model is still x."""
        mass = _Mass(w)
        return {"x": mass.biased / float(mass.weight)}

    def take_share(self, w: Node, share: Mapping[str, Tensor]) -> None:
        super().take_share(w, share)
        mass = _Mass(w)
        mass.biased.copy_(w.x)
        mass.weight.fill_(1.0)


class _Mass:
    """The x and w of a worker; what its model holds is z = x / w.

    The weights of all add up to the number of workers, or steps are longer or shorter than the learning rate
    says. A worker that departs takes along the weight that it has, or that is on its way to it. So all then
    issue their weights anew: w becomes 1, z stays. Shares carry the number of the issue. A share of an
    earlier one does not count; one of a later one makes its taker issue, too.
    """

    def __init__(self, w: Node) -> None:
        self.biased = w.keep("biased", w.x)
        self.weight = w.keep("weight", torch.ones(1, dtype=torch.float64))
        self._issue = w.keep("issue", torch.zeros(1, dtype=torch.int64))

    @property
    def issue(self) -> int:
        """The number of the last issue; 0 where nobody has departed."""
        return int(self._issue)

    def issue_anew(self, number: int) -> None:
        """Set the weight to 1, and keep z."""
        self.biased /= float(self.weight)
        self.weight.fill_(1.0)
        self._issue.fill_(number)

    def keep(self, x: Tensor, kept: float) -> None:
        """Keep this part of x and of the weight; the rest was given away."""
        torch.mul(x, kept, out=self.biased)
        self.weight *= kept

    def add(self, m: Message) -> None:
        """Take a share in; a message without parts says that none comes."""
        if m.version > self.issue:
            self.issue_anew(m.version)
        if m.parts and m.version == self.issue:
            self.biased += m.body
            self.weight += m.count


class _WaysBack:
    """Which of the others shares can come back from, past those who have departed.

    What a worker gave to others would be lost to it, and its weight would tend to 0.
    """

    def __init__(self, graph: Topology, w: Node) -> None:
        self._graph, self._w = graph, w
        self._away: set[int] | None = None  # for which `_component` was computed
        self._component: set[int] = set()

    def lead_from(self, ranks: Iterable[int]) -> list[int]:
        """Those of them from whom a share can come back to this worker."""
        rank, everyone = self._w.rank, range(self._w.size)
        away = set(everyone).difference(self._w.here(everyone))
        if away != self._away:
            self._away, self._component = away, strongly_connected(self._graph, rank, len(everyone), away)
        return [k for k in ranks if k in self._component]
