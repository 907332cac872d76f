"""Servers in a tree: aggregators near the workers, one server above them (Gupta, Zhang & Wang 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.identity import SERVER
from shoal.core.limits import at_least
from shoal.engine.protocol import Push
from shoal.vocabulary.gathering import Gathering
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central, Setting


@dataclass(frozen=True)
class Hierarchical(Central):
    """SGD in two levels: an aggregator sends on its group's mean gradient and sample count.

    Synchronous, unless `collect` is given: then aggregators do not wait for all, nor the server for them.
    Workers whose aggregator dies turn to the server itself.
    """

    recovers: ClassVar[str] = "memory"  # what an aggregator sent on is not its own to repeat

    groups: int = 2  # aggregators; workers are shared out among them in order of rank
    collect: int | None = None  # gradients an aggregator sends on as one, whoever they are from; None: all

    def __post_init__(self) -> None:
        at_least(1, groups=self.groups, collect=self.collect)

    @property
    def servers(self) -> int:
        return 1 + self.groups

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.groups > setting.workers:
            raise ValueError(
                f"Hierarchical(groups={self.groups}) has more groups than the {setting.workers} workers"
            )

    def steps_per_update(self, workers: int) -> float:
        return self.collect or workers

    @property
    def mixes_steps(self) -> bool:
        return self.collect is not None

    async def worker(self, w: Node) -> None:
        above = SERVER - 1 - w.rank * self.groups // w.size
        is_fresh = False
        async for t in w.steps():
            if not is_fresh:
                await w.pull(above, out=w.x)
            await w.push(above, await w.grad(), counts=w.unmerged > 0)
            await w.pull(above, out=w.x)  # the answer comes when the step is made
            await w.report()
            is_fresh = not w.is_last(t)  # later ones wait until there is work

    async def server(self, s: Node) -> None:
        gathering = Gathering(s)
        async for m in gathering.inbox():
            if isinstance(m, Push):
                gathering.add(m, waits=self.collect is None)
            if len(gathering) > 0 and self._is_complete(s, gathering):
                await self._make_step(s, gathering)

    def _is_complete(self, s: Node, gathering: Gathering) -> bool:
        """Whether the round is over, or nobody is left who could give to it."""
        is_enough = self.collect is not None and len(gathering) >= (self.collect if s.role else 1)
        return is_enough or all(self._has_given(s, gathering, rank) for rank in s.active)

    def _has_given(self, s: Node, gathering: Gathering, rank: int) -> bool:
        """Whether this worker's gradient is in, by itself or through its aggregator; others' need not be."""
        role = 1 + rank * self.groups // s.size
        return s.role not in (0, role) or gathering.has(rank) or gathering.has(s.counterpart(role))

    async def _make_step(self, s: Node, gathering: Gathering) -> None:
        """Make the step of a round: at the server itself, or through the one above."""
        if s.role == 0:
            gathering.descend()
            return
        mean, _ = gathering.close()
        await s.push(SERVER, mean.body, count=mean.count, like=mean, counts=mean.count > 0)
        await s.pull(SERVER, out=s.x)
        s.advance(mean.count)
