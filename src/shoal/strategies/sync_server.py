"""Synchronous SGD through a server, with backup workers for the slow ones (Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.limits import at_least
from shoal.engine.protocol import Push
from shoal.vocabulary.gathering import Gathering
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central, Setting


@dataclass(frozen=True)
class SyncServer(Central):
    """Every version is the mean gradient of all workers but the slowest `backup`; theirs is dropped."""

    backup: int = 0  # b: of N + b workers the first N count

    def __post_init__(self) -> None:
        at_least(0, backup=self.backup)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.backup >= setting.workers:
            raise ValueError(
                f"SyncServer(backup={self.backup}) leaves no gradient of {setting.workers} workers to use"
            )

    def steps_per_update(self, workers: int) -> float:
        return workers - self.backup

    def optimizer_steps(self, workers: int) -> float:
        return 1  # late pushes are dropped

    @property
    def may_drop(self) -> bool:
        return self.backup > 0

    @property
    def mixes_steps(self) -> bool:
        return self.backup > 0

    async def server(self, s: Node) -> None:
        gathering = Gathering(s)
        async for m in gathering.inbox():
            if isinstance(m, Push) and m.version < s.version:
                gathering.drop(m)
            elif isinstance(m, Push):
                gathering.add(m)
            enough = gathering.givers >= s.size - self.backup or not gathering.lacks(s.active)
            if len(gathering) > 0 and enough:
                gathering.descend()
