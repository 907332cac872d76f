"""HALoS: hierarchical asynchronous local SGD, a server in each region and one above (Kim et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between
from shoal.engine.protocol import Fewer, Pull, Push, RolledBack
from shoal.vocabulary.delayed_nesterov import DelayedNesterov
from shoal.vocabulary.node import Node
from shoal.vocabulary.paces import Paces
from shoal.vocabulary.strategy import Sends, Setting, Strategy


@dataclass(frozen=True)
class HALoS(Strategy):
    """Workers trade with the server of their region, which now and then trades with the one above.

    No worker waits for another, only for its server. Workers whose server dies turn to the one above.
    """

    sends = Sends.DIFFERENCES
    recovers: ClassVar[str] = "memory"  # what a region's server sent on is not its own to repeat

    groups: int = 2  # regions; workers are shared out among them in order of rank
    period: int = 8  # H: inner steps in a round of the fastest worker
    exchange: int = 32  # K: rounds of its workers between two exchanges of a region with the server above
    mixing: float = 0.25  # a: how much of the model above a region takes over then
    local_rate: float = 0.2  # of a region's server, for each round of a worker
    local_momentum: float = 0.9
    local_buffer: int = 16  # rounds for each step of its momentum
    rate: float = 0.15  # of the server above, for each exchange
    momentum: float = 0.5
    buffer: int = 2  # exchanges for each step of its momentum
    dynamic: bool = True  # a slower worker takes as many fewer inner steps in a round

    def __post_init__(self) -> None:
        at_least(1, groups=self.groups, period=self.period, exchange=self.exchange)
        at_least(1, local_buffer=self.local_buffer, buffer=self.buffer)
        at_least(0, mixing=self.mixing)
        above(0, local_rate=self.local_rate, rate=self.rate)
        between(0, 1, local_momentum=self.local_momentum, momentum=self.momentum)
        if self.mixing > 1:
            raise ValueError(f"mixing={self.mixing} must be at most 1")

    @property
    def servers(self) -> int:
        return 1 + self.groups

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.groups > setting.workers:
            raise ValueError(
                f"HALoS(groups={self.groups}) has more groups than the {setting.workers} workers"
            )

    def steps_per_update(self, workers: int) -> float:
        local, above = (1 - self.local_momentum) / self.local_rate, (1 - self.momentum) / self.rate
        return local * above  # each server's rate and momentum change the length of every step

    @property
    def mixes_steps(self) -> bool:
        return True  # the servers' momenta are of whatever came

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # where this round began
        steps = w.keep("steps", torch.zeros(2, dtype=torch.int64))  # of this round: done, and in all
        paces, region = Paces(w), self._region(w)
        async for t in w.steps():
            if steps[0] == 0:
                paces.begin()
                await w.pull(region, out=w.x)
                start.copy_(w.x)
                steps[1] = paces.steps(self.period, ceil) if self.dynamic else self.period
            await w.step()
            steps[0] += 1
            if steps[0] >= steps[1] or w.is_last(t):
                steps[0] = 0
                await w.push(region, start - w.x)
                if self.dynamic:
                    await paces.tell()
                if w.is_last(t):
                    await self._flush(w)
                await w.report()

    async def finish(self, w: Node) -> None:
        if w.unmerged:  # the loop ended where nobody could have known
            await w.push(self._region(w), w.keep("start", w.x) - w.x)
            await self._flush(w)
            await w.report()
        await w.take_result()

    async def server(self, s: Node) -> None:
        await (Region(self, s).serve() if s.role else self._serve_above(s))

    async def _serve_above(self, s: Node) -> None:
        outer = DelayedNesterov(s, self.rate * self.buffer, self.momentum, self.buffer)
        await s.serve(lambda push: outer.step(push.body))

    async def _flush(self, w: Node) -> None:
        """Have the region pass on what it holds: it does when somebody pulls twice without a push."""
        region = self._region(w)
        await w.pull(region)
        await w.pull(region)

    def region_of(self, worker: int, workers: int) -> int:
        """The number of a worker's region, from 0."""
        return worker * self.groups // workers

    def _region(self, w: Node) -> int:
        return SERVER - 1 - self.region_of(w.rank, w.size)


class Region:
    """The server of a region: its own outer optimizer, and its exchanges with the server above."""

    def __init__(self, options: HALoS, s: Node) -> None:
        self._node, self._options = s, options
        rate = options.local_rate * options.local_buffer
        self._outer = DelayedNesterov(s, rate, options.local_momentum, options.local_buffer)
        self._base = s.keep("base", s.x, shared=True)  # the model after the last exchange
        self._since = s.keep("since", torch.zeros(1, 2, dtype=torch.float64), shared=True)[
            0
        ]  # rounds, samples
        self._read = s.keep(
            "read", torch.zeros(s.size, dtype=torch.bool)
        )  # who has pulled since its last push

    async def serve(self) -> None:
        """Answer the workers of the region, and trade with the server above after every so many rounds."""
        s = self._node
        async for m in s.inbox():
            if isinstance(m, Push):
                self._outer.step(m.body)
                self._since += torch.tensor([1.0, m.count])
                self._read[m.src] = False
                s.advance(m.count)
                if self._since[0] >= self._options.exchange:
                    await self._trade()
            elif isinstance(m, Pull):
                if self._read[m.src] and self._since[0] > 0:
                    await self._trade()
                self._read[m.src] = True
                await s.reply(m, s.x)
            elif isinstance(m, Fewer):  # it may have been the last, whose pulls would bring this about
                if self._is_own(m.src) and self._since[0] > 0:
                    await self._trade()
            elif isinstance(m, RolledBack):  # some of what it holds may have been passed on: never twice
                self._begin_anew()

    def _is_own(self, worker: int) -> bool:
        return self._options.region_of(worker, self._node.size) == self._node.role - 1

    async def _trade(self) -> None:
        s = self._node
        await s.push(SERVER, self._base - s.x, count=float(self._since[1]))
        s.x.lerp_(await s.pull(SERVER), self._options.mixing)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._base.copy_(self._node.x)
        self._since.zero_()
