"""Ensemble: models that never meet, whose predictions are averaged (Hansen & Salamon 1990)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.codec import Codec
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Ensemble(Strategy):
    """Everyone trains a model of its own, from weights of its own; the mean of their predictions counts."""

    independent: ClassVar[bool] = True
    survives: ClassVar[bool] = True
    compresses: ClassVar[bool] = False

    all_data: bool = False  # every member sees all data, so that all together take N times as many samples

    @property
    def shares_out(self) -> bool:
        return not self.all_data

    def check_codec(self, codec: Codec) -> None:
        if not codec.exact:
            raise ValueError(f"Ensemble sends nothing, so {codec} would do nothing")

    def check_loop(self) -> None:
        raise ValueError(
            "run() and compare average the predictions of an ensemble; for one from a loop of your own, "
            "start the script several times with seeds of its own"
        )

    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            w.descend(await w.grad())
            w.merged += w.take_unmerged() * w.size  # the others are as far, as far as it knows
