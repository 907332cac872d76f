"""One worker and nobody else: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Single(Strategy):
    """Plain SGD on one worker: what every other strategy is measured against."""

    most_workers: ClassVar[int | None] = 1
    averages_gradients: ClassVar[bool] = True

    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            w.descend(await w.mean(w.grad()))  # the mean of one, so that its samples count as merged
