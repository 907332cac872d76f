"""Hogwild!: workers change one shared vector without asking anybody (Niu et al. 2011).

On a transport that crosses machines this is the one-sided parameter server: the server's process owns the
memory and does nothing, workers get it and add to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.identity import SERVER
from shoal.engine.protocol import Report
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Every worker reads the shared vector and adds its step to it; no addition is lost.

    The step is that of the worker's own optimizer, which keeps a state of its own, as momentum.
    """

    sends = Sends.MEMORY
    one_sided: ClassVar[bool] = True
    recovers: ClassVar[str] = "none"

    @property
    def servers(self) -> int:
        return 1

    def steps_per_update(self, workers: int) -> float:
        return 1  # everyone's steps add up

    async def worker(self, w: Node) -> None:
        change = torch.empty_like(w.x)  # a fresh vector at every step would cost as much as another pass
        async for _ in w.steps():
            await w.pull(SERVER, out=change)
            w.x.copy_(change)
            await w.step()
            torch.sub(w.x, change, out=change)
            await w.push(SERVER, change)

    async def finish(self, w: Node) -> None:
        await w.take_result()

    async def server(self, s: Node) -> None:
        async for m in s.inbox():
            if isinstance(m, Report):  # there is no push: workers change the memory themselves
                s.advance(m.count)
