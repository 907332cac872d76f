"""CHOCO-SGD: gossip with compressed differences (Koloskova, Stich & Jaggi 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.limits import above
from shoal.topologies import both_ways
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Sends, Setting

WHOLE = 1.0
"""Count of a message with the whole copy, to a neighbour that was back or that one that was back meets."""


@dataclass(frozen=True)
class CHOCO(Decentral):
    """Neighbours keep copies of each other's models; what travels is how a model differs from its copy.

    What the codec loses stays in that difference, so no error is ever lost.
    """

    in_rounds = True
    sends = Sends.DIFFERENCES

    topology: str = "ring"  # W: Metropolis-Hastings weights on a graph that stays and leads both ways
    rate: float | None = (
        None  # gamma: how far to go towards the neighbours; None: 1, or 1/2 if the codec is lossy
    )

    def __post_init__(self) -> None:
        above(0, rate=self.rate)
        if not both_ways(self.topology).static:
            raise ValueError(
                f"topology {self.topology!r} changes from round to round, and CHOCO keeps copies of its "
                "neighbours' models; take one that stays, as ring, torus, hypercube or complete"
            )

    def check(self, setting: Setting) -> None:
        super().check(setting)
        both_ways(self.topology).check(setting.workers)

    async def worker(self, w: Node) -> None:
        weights = both_ways(self.topology).weights(w.rank, w.size, 0)
        gamma = (0.5 if w.lossy else 1.0) if self.rate is None else self.rate
        nothing = torch.zeros_like(w.x)
        own = w.keep("own copy", nothing, mutual=True)  # x hat, as the neighbours have it
        copies = {k: w.keep(f"copy of {k}", nothing, mutual=True) for k in weights}
        met = {k: -1 if w.incarnation else w.incarnation_of(k) for k in weights}  # who has this one's copy
        async for t in w.rounds():
            await w.step()
            news = w.encode("difference", w.x - own, times=len(weights), feedback=False)
            own += w.decode(news)
            present = w.here(weights)
            new = [k for k in present if met[k] != w.incarnation_of(k)]
            await w.give(t, [k for k in present if k not in new], *news)
            await w.give(t, new, own, count=WHOLE)
            for k, m in (await w.take(t, present)).items():
                copies[k].copy_(m.body if m.count == WHOLE else copies[k] + w.decode(m.parts))
                met[k] = w.incarnation_of(k)
                w.x.add_(copies[k] - own, alpha=gamma * weights[k])
