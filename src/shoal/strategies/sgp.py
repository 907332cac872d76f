"""Stochastic gradient push: averages over one-way graphs, by push-sum (Assran et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import at_least
from shoal.topologies import named
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
        async for t in w.rounds():
            g = await w.grad()
            w.x.copy_(biased)
            w.descend(g)  # the gradient is taken at z, and moves x
            out = graph.out_of(w.rank, w.size, t)
            p, present = 1 / (len(out) + 1), w.here(out)
            await w.give(t, present, w.x * p, count=float(weight) * p)
            kept = 1 - p * len(present)  # shares of those who take no part stay here
            torch.mul(w.x, kept, out=biased)
            weight *= kept
            for r in range(max(first, t - self.overlap), t + 1):  # earlier ones are in, or lost
                for k in graph.into(w.rank, w.size, r):
                    m = await w.take(r, k, wait=r == t - self.overlap)
                    if m is not None:
                        biased += m.body
                        weight += m.count
            torch.div(biased, float(weight), out=w.x)

    async def finish(self, w: Node) -> None:
        biased, weight = _mass(w)
        for m in await w.part():
            biased += m.body
            weight += m.count
        wide = torch.promote_types(biased.dtype, torch.float32)
        total = await w.average(torch.cat((biased.to(wide), weight.to(biased.device, wide))))
        w.x.copy_(total[:-1] / total[-1])  # the sum of all x over that of all w: more than the mean of z


def _mass(w: Node) -> tuple[Tensor, Tensor]:
    """x and w; what the model itself holds is z = x / w. Who is back brings a weight of 1, as at first."""
    return w.keep("biased", w.x), w.keep("weight", torch.ones(1, dtype=torch.float64))
