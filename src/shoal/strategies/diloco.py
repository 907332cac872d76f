"""DiLoCo: distributed low-communication training (Douillard et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import above, at_least, between
from shoal.vocabulary.merged_blocks import check_overlap, merged_blocks
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Local steps of the user's optimizer inside; Nesterov momentum on the average displacement outside."""

    sends = Sends.DIFFERENCES
    ends_equal = True
    keeps_changes = False  # its momentum goes beyond them

    period: int = 500  # H: inner steps in a round
    rate: float = 0.7  # outer learning rate
    momentum: float = 0.9  # outer momentum
    warmup: int = 0  # first steps, averaged one by one: the paper starts from a trained model
    overlap: int = 0  # 1: a mean is taken in one block late, so that nobody waits for it

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        at_least(0, warmup=self.warmup)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        check_overlap(self.overlap)

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # outer momentum lengthens steps on a slope

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # theta: where every round begins
        velocity = w.keep("velocity", torch.zeros_like(w.x), shared=True)
        async for merged in merged_blocks(w, start, self.period, self.warmup, self.overlap, sign=-1):
            if merged.is_warmup:
                start -= merged.update
            else:
                velocity.mul_(self.momentum).add_(merged.update)
                start.sub_(merged.update.add(velocity, alpha=self.momentum), alpha=self.rate)

    def solution(self, node: Node) -> Tensor:
        return node.keep("start", node.x)
