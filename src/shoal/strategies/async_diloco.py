"""Asynchronous DiLoCo: delayed Nesterov momentum and local steps that follow speed (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between
from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Setting, Strategy

PACE, GO = "pace", "go"


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
        since = w.compute_seconds, w.t  # of this round, or of this process
        async for t in w.steps():
            if steps[0] == 0:
                since = w.compute_seconds, t
                await w.pull(SERVER, out=w.x)
                start.copy_(w.x)
                steps[1] = self._length(w)
            w.descend(await w.grad())
            steps[0] += 1
            if steps[0] >= steps[1] or w.is_last(t):
                steps[0] = 0
                pace = (w.compute_seconds - since[0]) / (t + 1 - since[1])
                await self._hand_over(w, start, pace, is_last=w.is_last(t))

    async def finish(self, w: Node) -> None:
        if w.unmerged:  # the loop ended where nobody could have known
            await w.push(SERVER, w.keep("start", w.x) - w.x)
        await w.take_result()

    async def server(self, s: Node) -> None:
        velocity = s.keep("velocity", torch.zeros_like(s.x), shared=True)  # m
        delayed = s.keep("delayed", torch.zeros_like(s.x), shared=True)  # Delta
        arrivals = s.keep("arrivals", torch.tensor(0), shared=True)  # t
        waiting: set[int] = set()  # workers within their grace period
        async for m in s.inbox():
            if isinstance(m, Push):
                self._apply(s, m.body, velocity, delayed, arrivals)
                s.advance(m.count)
                waiting.add(m.src)
            elif isinstance(m, Pull):
                if m.src in waiting and self.grace:  # the first whose time is up ends it for all
                    for rank in waiting - {m.src}:
                        await s.send(rank, Message(GO))
                    waiting.clear()
                await s.reply(m, s.x)

    def _apply(self, s: Node, g: Tensor, velocity: Tensor, delayed: Tensor, arrivals: Tensor) -> None:
        """Delayed Nesterov: the momentum takes a step with every N-th displacement."""
        length, share = self.buffer or s.size, self.activation
        delayed += g
        arrivals += 1
        if arrivals % length == 0:
            velocity.mul_(self.momentum).add_(delayed, alpha=1 / length)
            delayed.zero_()
            share = 1 - share * (length - 1)
        s.x.sub_(velocity, alpha=self.rate * share * self.momentum).sub_(g, alpha=self.rate / length)

    async def _hand_over(self, w: Node, start: Tensor, pace: float, is_last: bool) -> None:
        """Push the displacement, tell the others this worker's pace, and wait out the grace period."""
        self._paces(w)[w.rank] = pace
        for _ in w.poll(GO):  # of a grace period that is over
            pass
        await w.push(SERVER, start - w.x)
        if self.dynamic:
            for rank in w.others:
                await w.send(rank, Message(PACE, rate=pace))
        if self.grace and not is_last:
            await w.wait(self.grace, GO)

    def _length(self, w: Node) -> int:
        """Inner steps of the next round: fewer, the slower this worker is beside the fastest."""
        paces = self._paces(w)
        for m in w.poll(PACE):
            paces[m.src] = m.rate
        known = [float(paces[k]) for k in (w.rank, *w.others) if paces[k] > 0]
        if not (self.dynamic and paces[w.rank] > 0):
            return self.period
        return max(1, floor(self.period * min(known) / float(paces[w.rank]) + 1e-6))

    def _paces(self, w: Node) -> Tensor:
        return w.keep("paces", torch.zeros(w.size, dtype=torch.float64))  # seconds a step; 0: not known
