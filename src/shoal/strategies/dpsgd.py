"""D-PSGD: decentralised parallel SGD, everyone mixes with its neighbours (Lian et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.topologies import both_ways
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting


@dataclass(frozen=True)
class DPSGD(Decentral):
    """At every step each model becomes a weighted mean of itself and its neighbours'.

    The neighbours' models travel while the gradient is computed, at the model as it was before.
    """

    in_rounds = True
    keeps_changes = False  # neighbours mix in what they were told before

    topology: str = "ring"  # W: Metropolis-Hastings weights on any graph whose edges lead both ways
    overlap: bool = True  # False: neighbours mix what the step has made of their models

    def __post_init__(self) -> None:
        both_ways(self.topology)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        both_ways(self.topology).check(setting.workers)

    async def worker(self, w: Node) -> None:
        graph = both_ways(self.topology)
        async for t in w.rounds():
            weights = graph.weights(w.rank, w.size, t)
            if not self.overlap:
                await w.step()
            present = w.here(weights)
            await w.give(t, present, w.x)
            g = await w.grad() if self.overlap else None
            theirs = await w.take(t, present)
            kept = 1 - sum(weights[k] for k in theirs)  # of who took no part, the weight stays here
            mixed = w.x.mul(kept)
            for k, m in theirs.items():
                mixed.add_(m.body, alpha=weights[k])
            w.x.copy_(mixed)
            if g is not None:
                w.descend(g)
