"""Elastic averaging SGD and its momentum form EAMSGD (Zhang, Choromanska & LeCun 2015)."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import torch

from shoal.core.identity import SERVER
from shoal.core.limits import at_least, between, one_of
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Setting, Strategy

ORDERS = ("saved", "moved")


@dataclass(frozen=True)
class EASGD(Strategy):
    """Each worker explores on its own; a spring pulls it and a centre towards each other."""

    sends = Sends.DIFFERENCES
    rate: float | None = None  # alpha: strength of the spring; None: 0.9 / N
    period: int = 10  # tau: local steps between exchanges
    synchronous: bool = False  # all exchange at once, and every worker holds the centre
    order: str = "saved"  # a worker moves after the step that follows an exchange; "moved": before it

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        between(0, 1, rate=self.rate)
        one_of(ORDERS, order=self.order)
        if self.synchronous and self.order != "saved":
            raise ValueError(
                "synchronous=True takes gradients where the workers were: leave order='moved' out"
            )

    @property
    def servers(self) -> int:
        return 0 if self.synchronous else 1

    def check(self, setting: Setting) -> None:
        super().check(setting)
        workers = setting.workers
        if self.synchronous and self.rate is not None and (beta := workers * self.rate) > 1:
            raise ValueError(
                f"EASGD(rate={self.rate}) would overshoot: with {workers} workers the centre moves by "
                f"rate * workers = {beta:g}, which must not exceed 1. Try rate={0.9 / workers:.3g}."
            )

    async def worker(self, w: Node) -> None:
        if w.incarnation and not self.synchronous:  # it came back: not to where everything began
            await w.pull(SERVER, out=w.x)
        async for t in w.steps():
            force = await self._exchange(w) if t % self.period == 0 else None
            if force is not None and self.order == "moved":
                w.x -= force
            await self._local_step(w)
            if force is not None and self.order == "saved":
                w.x -= force

    async def finish(self, w: Node) -> None:
        if w.unmerged or (self.synchronous and w.t):  # what was done since the last exchange
            await self._exchange(w)
        if self.synchronous:
            w.x.copy_(self.solution(w))
        else:
            await w.take_result()

    async def server(self, s: Node) -> None:
        await s.serve(lambda push: s.x.add_(push.body))

    def solution(self, node: Node) -> torch.Tensor:
        return node.keep("centre", node.x, shared=True) if self.synchronous else node.x

    async def _exchange(self, w: Node) -> torch.Tensor:
        """Pull the centre by the spring; returns the force on the worker."""
        alpha = 0.9 / w.size if self.rate is None else self.rate
        if self.synchronous:
            centre = self.solution(w)
            force = alpha * (w.x - centre)
            centre.add_(await w.mean(force, weight=1), alpha=w.size)
        else:
            force = (w.x - await w.pull(SERVER)).mul_(alpha)
            await w.push(SERVER, force)
        return force

    def _local_step(self, w: Node) -> Awaitable[None]:
        return w.step()


@dataclass(frozen=True)
class EAMSGD(EASGD):
    """EASGD whose local steps have Nesterov momentum."""

    momentum: float = 0.9  # delta; the paper's 0.99 wants a ten times smaller learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, momentum=self.momentum)

    def steps_per_update(self, workers: int) -> float:
        return super().steps_per_update(workers) * (1 - self.momentum)  # local momentum lengthens each step

    @property
    def mixes_steps(self) -> bool:
        return True  # the velocity of one optimizer's steps moves the parameters of all

    async def _local_step(self, w: Node) -> None:
        velocity = w.keep("velocity", torch.zeros_like(w.x))
        ahead = w.x.add(velocity, alpha=self.momentum)
        g = await w.grad(at=ahead)
        w.x.copy_(ahead)
        w.descend(g)
        velocity.mul_(self.momentum).add_(w.x - ahead)
