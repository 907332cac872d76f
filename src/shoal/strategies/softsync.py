"""n-softsync: the server waits for some gradients, whoever they are from (Zhang et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.node import Node
from shoal.core.strategy import Central, at_least
from shoal.core.transport import Message


@dataclass(frozen=True)
class SoftSync(Central):
    """A new version for every `collect` gradients: their mean, weighted by the samples behind them."""

    collect: int | None = None  # c; the paper's n-softsync is c = N / n. None: as many as there are workers
    wait: bool = False  # who has given a gradient gets no answer before there is a new version
    staleness_aware: bool = True  # divide each gradient's rate by the versions it is behind

    def __post_init__(self) -> None:
        at_least(1, collect=self.collect)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.wait and (self.collect or 0) > workers:
            raise ValueError(
                f"SoftSync(collect={self.collect}, wait=True) would wait for ever: {workers} workers give "
                f"one gradient each. Try collect={workers}."
            )

    async def server(self, s: Node) -> None:
        total = s.keep("total", torch.zeros_like(s.x))
        tally = s.keep("tally", torch.zeros(2, dtype=torch.float64))  # gradients, samples
        gave = s.keep("gave", torch.zeros(s.size, dtype=torch.bool))
        waiting: dict[int, Message] = {}
        async for m in s.inbox():
            if m.tag == "pull":
                waiting[m.src] = m
            elif m.tag == "push":
                staleness = s.version - m.version if self.staleness_aware else 0
                total.add_(m.body, alpha=m.count * m.rate / max(1, staleness))
                tally += torch.tensor([1.0, m.count])
                gave[m.src] = True
            still_to_give = [rank for rank in s.active if not (self.wait and gave[rank])]
            if tally[0] >= (self.collect or s.size) or (tally[0] > 0 and not still_to_give):
                s.x.sub_(total, alpha=1 / float(tally[1]))
                s.advance(float(tally[1]))
                for memory in (total, tally, gave):
                    memory.zero_()
            for rank in [rank for rank in waiting if not (self.wait and gave[rank])]:
                await s.reply(waiting.pop(rank), s.x)
