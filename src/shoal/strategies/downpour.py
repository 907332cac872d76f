"""Downpour SGD: a parameter server that nobody waits for (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.transport import Message
from shoal.vocabulary.node import SERVER, Node
from shoal.vocabulary.strategy import Central, above, at_least, between

OPTIMIZERS = ("sgd", "momentum", "adagrad")


@dataclass(frozen=True)
class Downpour(Central):
    """Workers fetch the model and push gradients at their own pace; the server applies them as they come."""

    n_fetch: int = 1  # steps between two fetches
    n_push: int = 1  # steps between two pushes; gradients add up meanwhile
    overlap: bool = False  # fetch and push while the next gradient is computed
    optimizer: str = "sgd"  # the server's: sgd, momentum or adagrad
    rate: float | None = None  # the server's; None: the worker's own, which may follow a schedule
    warmup: int = 20  # updates over which the server's rate grows to its full size
    warm_start: int = 0  # updates that the first worker makes before the others join in
    momentum: float = 0.9  # of the server's momentum
    eps: float = 1e-8  # adagrad: where the gradient has always been 0
    fixed_shares: bool = True  # each worker keeps to its own share of the data

    def __post_init__(self) -> None:
        at_least(1, n_fetch=self.n_fetch, n_push=self.n_push)
        at_least(0, warmup=self.warmup, warm_start=self.warm_start, eps=self.eps)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} must be one of {', '.join(OPTIMIZERS)}")

    async def worker(self, w: Node) -> None:
        accrued = w.keep("accrued", torch.zeros_like(w.x))
        coming = None
        async for t in w.steps():
            did_its_own = w.is_last(t - 1)  # and waited for a batch that another worker left
            if t % self.n_fetch == 0 or did_its_own or not w.client.seen:  # or came back within a period
                w.x.copy_(await (coming or await w.ask(SERVER)))
            fetch_next = self.overlap and (t + 1) % self.n_fetch == 0 and not w.is_last(t)
            coming = await w.ask(SERVER) if fetch_next else None
            g = await w.grad()
            accrued += g
            w.descend(g)
            if (t + 1) % self.n_push == 0 or w.is_last(t):
                await w.settle()  # the push before this one, which was under way meanwhile
                await w.post(SERVER, accrued.clone() if self.overlap else accrued)
                if not self.overlap:
                    await w.settle()
                accrued.zero_()

    async def finish(self, w: Node) -> None:
        await w.settle()
        if w.unmerged:  # the loop ended where nobody could have known
            await w.push(SERVER, w.keep("accrued", torch.zeros_like(w.x)))
        await w.pull(SERVER, out=w.x)

    async def server(self, s: Node) -> None:
        memory = s.keep("memory", torch.zeros_like(s.x))  # squares, or velocity
        early: dict[int, Message] = {}
        async for m in s.inbox():
            if m.tag == "pull":
                early[m.src] = m
            elif m.tag == "push":
                apply(self, s, m, memory)
                s.advance(m.count)
            warm = s.version >= self.warm_start or 0 not in s.active
            for rank in [rank for rank in early if warm or rank == 0]:
                await s.reply(early.pop(rank), s.x)


def apply(options: Downpour, s: Node, m: Message, memory: Tensor) -> None:
    """One step of the server's optimizer."""
    ramp = min(1.0, (s.version + 1) / options.warmup) if options.warmup else 1.0
    rate = ramp * (m.rate if options.rate is None else options.rate)
    if options.optimizer == "sgd":
        s.x.sub_(m.body, alpha=rate)
    elif options.optimizer == "momentum":
        s.x.sub_(memory.mul_(options.momentum).add_(m.body), alpha=rate)
    else:
        memory.addcmul_(m.body, m.body)
        s.x.addcdiv_(m.body, memory.sqrt().add_(options.eps), value=-rate)
