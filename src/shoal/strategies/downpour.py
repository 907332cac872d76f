"""Downpour SGD: a parameter server that nobody waits for (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.node import SERVER, Node
from shoal.core.strategy import Strategy, above, at_least
from shoal.core.transport import Message

OPTIMIZERS = ("sgd", "adagrad")


@dataclass(frozen=True)
class Downpour(Strategy):
    """Workers fetch the model and push gradients at their own pace; the server applies them as they come."""

    n_fetch: int = 1  # steps between two fetches
    n_push: int = 1  # steps between two pushes; gradients add up meanwhile
    optimizer: str = "sgd"  # the server's: sgd or adagrad
    rate: float | None = None  # the server's; None: the worker's own, which may follow a schedule
    warmup: int = 20  # pushes over which the server's rate grows to its full size
    eps: float = 1e-8  # adagrad: where the gradient has always been 0

    def __post_init__(self) -> None:
        at_least(1, n_fetch=self.n_fetch, n_push=self.n_push)
        at_least(0, warmup=self.warmup, eps=self.eps)
        above(0, rate=self.rate)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} must be one of {', '.join(OPTIMIZERS)}")

    @property
    def servers(self) -> int:
        return 1

    async def worker(self, w: Node) -> None:
        accrued = w.keep("accrued", torch.zeros_like(w.x))
        async for t in w.steps():
            if t % self.n_fetch == 0:
                w.x.copy_(await w.pull(SERVER))
            g = await w.grad()
            accrued += g
            w.descend(g)
            if (t + 1) % self.n_push == 0:
                await w.push(SERVER, accrued)
                accrued.zero_()

    async def finish(self, w: Node) -> None:
        if w.t % self.n_push != 0:
            await w.push(SERVER, w.keep("accrued", w.x))
        w.x.copy_(await w.pull(SERVER))

    async def server(self, s: Node) -> None:
        squares = s.keep("squares", torch.zeros_like(s.x))
        async for m in s.inbox():
            if m.tag == "pull":
                await s.reply(m, s.x)
            elif self.optimizer == "sgd":
                s.x.sub_(m.body, alpha=self._rate(s, m))
            else:
                squares.addcmul_(m.body, m.body)
                s.x.addcdiv_(m.body, squares.sqrt().add_(self.eps), value=-self._rate(s, m))

    def _rate(self, s: Node, m: Message) -> float:
        ramp = min(1.0, (s.version + 1) / self.warmup) if self.warmup else 1.0
        return ramp * (m.rate if self.rate is None else self.rate)
