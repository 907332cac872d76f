"""SlowMo: slow momentum on top of model averaging (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import above, at_least, between
from shoal.vocabulary.merged_blocks import check_overlap, merged_blocks
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class SlowMo(Strategy):
    """Model averaging whose momentum knows the learning rate: where that falls, it carries on less."""

    sends = Sends.DIFFERENCES
    ends_equal = True
    keeps_changes = False  # its momentum goes beyond them

    period: int = 48  # tau: local steps in a block
    momentum: float = 0.5  # beta
    rate: float = 1.0  # alpha: slow learning rate, times the learning rate
    reset_momentum: bool = True  # of the local optimizer
    overlap: int = 0  # 1: a mean is taken in one block late, so that nobody waits for it

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        between(0, 1, momentum=self.momentum)
        above(0, rate=self.rate)
        check_overlap(self.overlap)

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # slow momentum lengthens steps on a slope

    @property
    def mixes_steps(self) -> bool:
        return True  # its momentum follows one learning rate

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # x0: where every block begins
        step = w.keep("step", torch.zeros_like(w.x), shared=True)  # -alpha lr u: no rate is divided by
        lr = w.keep("lr", torch.zeros(1, dtype=torch.float64), shared=True)  # of the block before
        async for merged in merged_blocks(w, start, self.period, overlap=self.overlap):
            fallen = merged.lr / float(lr) if lr > 0 else 0.0
            step.mul_(self.momentum * fallen).add_(merged.update, alpha=self.rate)
            lr.fill_(merged.lr)
            start += step
            if self.reset_momentum:
                w.reset_momentum()

    def solution(self, node: Node) -> Tensor:
        return node.keep("start", node.x)
