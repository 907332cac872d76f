"""One worker and nobody else: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Setting, Strategy


@dataclass(frozen=True)
class Single(Strategy):
    """Plain SGD on one worker: what every other strategy is measured against."""

    sends = Sends.MEAN_GRADIENTS

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.workers > 1:
            raise ValueError(f"Single runs on 1 worker, not on {setting.workers}")

    async def worker(self, w: Node) -> None:
        async for _ in w.rounds():
            await w.step()
