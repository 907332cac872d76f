"""Asynchronous DiLoCo: delayed Nesterov momentum and local steps that follow speed (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between
from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.delayed_nesterov import DelayedNesterov
from shoal.vocabulary.node import Node
from shoal.vocabulary.paces import Paces
from shoal.vocabulary.strategy import Sends, Setting, Strategy

GO = "go"
"""Tells a worker within its grace period that it is over."""


@dataclass(frozen=True)
class AsyncDiLoCo(Strategy):
    """DiLoCo in which nobody waits: every displacement is applied as it comes, its momentum once for many."""

    sends = Sends.DIFFERENCES

    period: int = 50  # H: inner steps in a round of the fastest worker
    rate: float = 0.7  # epsilon: outer learning rate
    momentum: float = 0.9  # beta: outer momentum
    buffer: int | None = None  # N: displacements between two steps of the momentum; None: one of each worker
    activation: float = 0.0  # c: share of the momentum in every other displacement; 1/N: all have the same
    dynamic: bool = True  # a slower worker takes as many fewer inner steps in a round
    grace: float = 0.0  # seconds that one which is done waits for others, to go on from their work too

    def __post_init__(self) -> None:
        at_least(1, period=self.period, buffer=self.buffer)
        at_least(0, grace=self.grace, activation=self.activation)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)

    @property
    def servers(self) -> int:
        return 1

    def check(self, setting: Setting) -> None:
        super().check(setting)
        length = self.buffer or setting.workers
        if self.activation * length > 1:
            raise ValueError(
                f"activation={self.activation:g} adds the momentum more than once in {length} arrivals: "
                f"1/{length} is the most"
            )

    def steps_per_update(self, workers: int) -> float:
        return (self.buffer or workers) * (1 - self.momentum) / self.rate

    @property
    def mixes_steps(self) -> bool:
        return True  # the server's momentum is of whatever came

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # where this round began
        steps = w.keep("steps", torch.zeros(2, dtype=torch.int64))  # of this round: done, and in all
        paces = Paces(w)
        async for t in w.steps():
            if steps[0] == 0:
                paces.begin()
                await w.pull(SERVER, out=w.x)
                start.copy_(w.x)
                steps[1] = paces.steps(self.period) if self.dynamic else self.period
            await w.step()
            steps[0] += 1
            if steps[0] >= steps[1] or w.is_last(t):
                steps[0] = 0
                for _ in w.poll(GO):  # of a grace period that is over
                    pass
                await w.push(SERVER, start - w.x)
                if self.dynamic:
                    await paces.tell()
                if self.grace and not w.is_last(t):
                    await w.wait(self.grace, GO)

    async def finish(self, w: Node) -> None:
        if w.unmerged:  # the loop ended where nobody could have known
            await w.push(SERVER, w.keep("start", w.x) - w.x)
        await w.take_result()

    async def server(self, s: Node) -> None:
        outer = DelayedNesterov(s, self.rate, self.momentum, self.buffer or s.size, self.activation)
        waiting: set[int] = set()  # workers within their grace period
        async for m in s.inbox():
            if isinstance(m, Push):
                outer.step(m.body)
                s.advance(m.count)
                waiting.add(m.src)
            elif isinstance(m, Pull):
                if m.src in waiting and self.grace:  # the first whose time is up ends it for all
                    for rank in sorted(waiting - {m.src}):
                        await s.send(rank, Message(GO))
                    waiting.clear()
                await s.reply(m, s.x)
