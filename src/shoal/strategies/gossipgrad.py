"""GossipGraD: one partner a step, and everybody's news reaches all in log N steps (Daily et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import one_of
from shoal.core.seeds import stream
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral

PARTNERS = ("dissemination", "hypercube")
MODES = ("model", "grad")


@dataclass(frozen=True)
class GossipGraD(Decentral):
    """Each step takes the mean with one other, 1, 2, 4, ... places away; then places are dealt out anew."""

    in_rounds = True

    partners: str = "dissemination"  # to one, from another; hypercube: both ways with one
    mode: str = "model"  # "grad" takes the mean of gradients: models then drift apart
    shuffle: bool = True  # deal the places out anew after every ceil(log2 N) steps
    seed: int = 0  # of the places, the same for all

    def __post_init__(self) -> None:
        one_of(PARTNERS, partners=self.partners)
        one_of(MODES, mode=self.mode)

    async def worker(self, w: Node) -> None:
        async for t in w.rounds():
            g = await w.grad()
            if self.mode == "grad":
                await self._mix(w, t, g)
                w.descend(g)
            else:
                w.descend(g)
                await self._mix(w, t, w.x)

    async def _mix(self, w: Node, t: int, v: Tensor) -> None:
        to, source = self.partners_of(w.rank, w.size, t)
        await w.give(t, w.here(to), v)
        for m in (await w.take(t, source)).values():
            v.add_(m.body).mul_(0.5)

    def partners_of(self, rank: int, workers: int, t: int) -> tuple[list[int], list[int]]:
        """Whom `rank` sends to in step `t`, and whom it hears from: one each, or nobody."""
        period = max(1, (workers - 1).bit_length())
        block, power = divmod(t, period)
        order = list(range(workers))
        if self.shuffle:
            order = torch.randperm(workers, generator=stream(self.seed, "places", block)).tolist()
        place, hop = order.index(rank), 1 << power
        if self.partners == "hypercube":
            other = [order[place ^ hop]] if place ^ hop < workers else []
            return other, other
        if workers == 1:
            return [], []
        return [order[(place + hop) % workers]], [order[(place - hop) % workers]]
