"""Post-local SGD: synchronous first, local afterwards (Lin et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.core.limits import at_least
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class PostLocal(Strategy):
    """Synchronous SGD up to the switch; from there on model averaging."""

    sends = Sends.DIFFERENCES
    ends_equal = True

    switch: int = 100  # t': steps with averaged gradients; the paper's end with the first decay of the rate
    period: int = 16  # H: local steps between two averages, after the switch
    reset_momentum: bool = True  # at each average, as in model averaging

    def __post_init__(self) -> None:
        at_least(0, switch=self.switch)
        at_least(1, period=self.period)

    async def worker(self, w: Node) -> None:
        async for _ in w.steps(until=self.switch):
            w.descend(await w.mean(w.grad()))
        if w.t < self.switch:
            return
        average = w.keep("average", w.x)
        async for _ in w.blocks(self.period, self.switch):
            average += await w.mean(w.x - average)
            w.x.copy_(average)
            if self.reset_momentum:
                w.reset_momentum()

    def solution(self, node: Node) -> Tensor:
        return node.keep("average", node.x) if node.t >= self.switch else node.x  # all models are one before
