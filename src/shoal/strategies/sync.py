"""Synchronous data-parallel SGD: one step on everybody's batch (Goyal et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class Sync(Strategy):
    """Average the gradients of all workers at every step: equal to one machine on the union batch."""

    sends = Sends.MEAN_GRADIENTS
    ends_equal = True

    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            w.descend(await w.mean(w.grad()))
