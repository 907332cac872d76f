"""Model averaging, also called local SGD (Zinkevich et al. 2010; Povey et al. 2014; Stich 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.core.limits import at_least
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Blockwise


@dataclass(frozen=True)
class Local(Blockwise):
    """Everyone trains alone for a while; then all models become their average."""

    period: int = 16  # tau: local steps between two averages
    warmup: int = 0  # first steps, averaged one by one
    reset_momentum: bool = True  # local velocity points where the worker was going, not the average
    blocks: int | None = (
        None  # M: the data in so many blocks; an average after a pass over one's split of each
    )

    def __post_init__(self) -> None:
        self.check_blocks()
        at_least(0, warmup=self.warmup)

    async def worker(self, w: Node) -> None:
        average = w.keep("average", w.x)
        async for _ in w.blocks(self.block_steps(w), self.warmup):
            average += await w.mean(w.x - average)
            w.x.copy_(average)
            if self.reset_momentum:
                w.reset_momentum()

    def solution(self, node: Node) -> Tensor:
        return node.keep("average", node.x)
