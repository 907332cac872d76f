"""Ensemble: models that never meet, whose predictions are averaged (Hansen & Salamon 1990)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Deal, Sends, Setting, Strategy


@dataclass(frozen=True)
class Ensemble(Strategy):
    """Everyone trains a model of its own, from weights of its own; the mean of their predictions counts."""

    sends = Sends.NOTHING
    independent: ClassVar[bool] = True
    survives: ClassVar[bool] = True

    all_data: bool = False  # every member sees all data, so that all together take N times as many samples

    @property
    def deal(self) -> Deal:
        return Deal(whole=self.all_data)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.own_loop:
            raise ValueError(
                "run() and compare average the predictions of an ensemble; for one from a loop of your own, "
                "start the script several times with seeds of its own"
            )

    def steps_per_update(self, workers: int) -> float:
        return (
            1 if self.all_data else workers
        )  # a member's steps are N times fewer, or as many as one worker's

    async def worker(self, w: Node) -> None:
        async for _ in w.rounds():
            await w.step()
