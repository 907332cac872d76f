"""Synchronous SGD through a server, with backup workers for the slow ones (Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.node import Node
from shoal.core.strategy import Central, at_least
from shoal.core.transport import Message


@dataclass(frozen=True)
class SyncServer(Central):
    """Every version is the mean gradient of all workers but the slowest `backup`; theirs is dropped."""

    backup: int = 0  # b: of N + b workers the first N count

    def __post_init__(self) -> None:
        at_least(0, backup=self.backup)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.backup >= workers:
            raise ValueError(
                f"SyncServer(backup={self.backup}) leaves no gradient of {workers} workers to use"
            )

    async def server(self, s: Node) -> None:
        total = s.keep("total", torch.zeros_like(s.x))
        samples = s.keep("samples", torch.zeros(1, dtype=torch.float64))
        gave = s.keep("gave", torch.zeros(s.size, dtype=torch.bool))
        waiting: dict[int, Message] = {}
        async for m in s.inbox():
            if m.tag == "pull":
                waiting[m.src] = m
            elif m.tag == "push" and m.version < s.version:
                s.meter.dropped += 1
            elif m.tag == "push":
                total.add_(m.body, alpha=m.rate * m.count)
                samples += m.count
                gave[m.src] = True
            if gave.any() and (gave.sum() >= s.size - self.backup or all(gave[rank] for rank in s.active)):
                s.x.sub_(total, alpha=1 / samples.item())
                s.advance(samples.item())
                for memory in (total, samples, gave):
                    memory.zero_()
            for rank in [rank for rank in waiting if not gave[rank]]:
                await s.reply(waiting.pop(rank), s.x)
