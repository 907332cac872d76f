"""Blockwise model-update filtering, "block momentum" (Chen & Huo 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import above, at_least, between, one_of
from shoal.vocabulary.merged_blocks import check_overlap, merged_blocks
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Blockwise

VARIANTS = ("paper", "cntk")


@dataclass(frozen=True)
class BMUF(Blockwise):
    """Model averaging whose step from one global model to the next has momentum.

    Averaging N models shortens every update N-fold; momentum 1 - 1/N makes up for it.
    """

    keeps_changes = False  # its momentum goes beyond them

    period: int = 50  # tau: local steps in a block
    momentum: float | None = None  # eta; None: 1 - 1/N
    rate: float = 1.0  # zeta
    nesterov: bool = True  # the next block starts from a look-ahead
    variant: str = "paper"  # "cntk" moves the reference itself by (1 + eta) delta, almost twice as far
    warmup: int | None = None  # first steps, averaged one by one without momentum; None: one period
    reset_momentum: bool = True  # of the local optimizer; keeping it often diverges
    blocks: int | None = None  # M: the data in so many blocks; a block is a pass over one's split of it
    overlap: int = 0  # 1: a mean is taken in one block late, so that nobody waits for it

    def __post_init__(self) -> None:
        self.check_blocks()
        at_least(0, warmup=self.warmup)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        one_of(VARIANTS, variant=self.variant)
        check_overlap(self.overlap)

    def steps_per_update(self, workers: int) -> float:
        eta = 1 - 1 / workers if self.momentum is None else self.momentum
        longer = self.rate * (1 + eta if self.variant == "cntk" and self.nesterov else 1)
        return workers * (1 - eta) / longer  # block momentum makes steps on a slope so much longer

    async def worker(self, w: Node) -> None:
        period = self.block_steps(w)
        warmup = period if self.warmup is None else self.warmup
        start = w.keep("start", w.x)  # W_g: where every block begins
        delta = w.keep("delta", torch.zeros_like(w.x), shared=True)
        async for merged in merged_blocks(w, start, period, warmup, self.overlap):
            update = merged.update  # G
            eta = 1 - 1 / w.size if self.momentum is None else self.momentum
            if not merged.is_warmup:
                delta.mul_(eta).add_(update, alpha=self.rate)
            if merged.is_warmup:
                start += update
            elif not self.nesterov:
                start += delta
            elif self.variant == "cntk":
                start.add_(delta, alpha=1 + eta)
            else:
                start.add_(update, alpha=self.rate).add_(delta, alpha=eta)
            if self.reset_momentum:
                w.reset_momentum()

    def solution(self, node: Node) -> Tensor:
        return node.keep("start", node.x)
