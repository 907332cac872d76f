"""Hogwild!: workers change one shared vector without asking anybody (Niu et al. 2011).

On a transport that crosses machines this is the one-sided parameter server: the server's process owns the
memory and does nothing, workers get it and add to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.engine.service import NOTED
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Every worker reads the shared vector and adds its step to it; no addition is lost."""

    compresses: ClassVar[bool] = False
    recovers: ClassVar[str] = "none"

    @property
    def servers(self) -> int:
        return 1

    async def worker(self, w: Node) -> None:
        await w.open_window()
        async for _ in w.steps():
            await w.fetch()
            g = await w.grad()
            await w.accumulate(g.mul(-w.lr))

    async def finish(self, w: Node) -> None:
        await w.fetch()

    async def server(self, s: Node) -> None:
        await s.open_window()
        async for m in s.inbox():
            if m.tag == NOTED:
                s.advance(m.count)
