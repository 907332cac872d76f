"""n-softsync: the server waits for some gradients, whoever they are from (Zhang et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.limits import at_least
from shoal.engine.protocol import Push
from shoal.vocabulary.gathering import Gathering
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central, Setting


@dataclass(frozen=True)
class SoftSync(Central):
    """A new version for every `collect` gradients: their mean, weighted by the samples behind them."""

    collect: int | None = None  # c; the paper's n-softsync is c = N / n. None: as many as there are workers
    wait: bool = False  # who has given a gradient gets no answer before there is a new version
    staleness_aware: bool = True  # divide each gradient's rate by the versions it is behind

    def __post_init__(self) -> None:
        at_least(1, collect=self.collect)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        workers = setting.workers
        if self.wait and (self.collect or 0) > workers:
            raise ValueError(
                f"SoftSync(collect={self.collect}, wait=True) would wait for ever: {workers} workers give "
                f"one gradient each. Try collect={workers}."
            )

    def steps_per_update(self, workers: int) -> float:
        return self.collect or workers

    @property
    def mixes_steps(self) -> bool:
        return not self.wait

    async def server(self, s: Node) -> None:
        gathering = Gathering(s)
        async for m in gathering.inbox():
            if isinstance(m, Push):
                staleness = s.version - m.version if self.staleness_aware else 0
                gathering.add(m, 1 / max(1, staleness), waits=self.wait)
            enough = len(gathering) >= (self.collect or s.size) or not gathering.lacks(s.active)
            if len(gathering) > 0 and enough:
                gathering.descend()
