"""Downpour SGD: a parameter server that nobody waits for (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between, one_of
from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central, Deal

OPTIMIZERS = ("sgd", "momentum", "adagrad")
WARMUP = 20


@dataclass(frozen=True)
class Downpour(Central):
    """Workers fetch the model and push gradients at their own pace; the server applies them as they come."""

    n_fetch: int = 1  # steps between two fetches
    n_push: int = 1  # steps between two pushes; gradients add up meanwhile
    overlap: bool = False  # fetch and push while the next gradient is computed
    optimizer: str | None = None  # the server's: sgd, momentum or adagrad; None: the one of your script
    rate: float | None = None  # of sgd, momentum and adagrad; None: the worker's own
    warmup: int | None = None  # updates over which the rate grows; None: 20, with your script's optimizer 0
    warm_start: int = 0  # updates that the first worker makes before the others join in
    momentum: float = 0.9  # of the server's momentum
    eps: float = 1e-8  # adagrad: where the gradient has always been 0
    fixed_shares: bool = True  # each worker keeps to its own share of the data

    def __post_init__(self) -> None:
        at_least(1, n_fetch=self.n_fetch, n_push=self.n_push)
        at_least(0, warmup=self.warmup, warm_start=self.warm_start, eps=self.eps)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        one_of(OPTIMIZERS, optimizer=self.optimizer)
        if self.optimizer is None and self.rate is not None:
            raise ValueError(
                f"rate={self.rate:g} is for optimizer='sgd', 'momentum' or 'adagrad'; the optimizer of your "
                "script has a rate of its own"
            )

    async def worker(self, w: Node) -> None:
        accrued = w.keep("accrued", torch.zeros_like(w.x))
        coming, sent, came_back = None, None, w.incarnation > 0
        async for t in w.steps():
            did_its_own = w.is_last(t - 1)  # and waited for a batch that another worker left
            if t % self.n_fetch == 0 or did_its_own or came_back:
                w.x.copy_(await (coming or await w.begin(w.pull(SERVER))))
                came_back = False
            fetch_next = self.overlap and (t + 1) % self.n_fetch == 0 and not w.is_last(t)
            coming = await w.begin(w.pull(SERVER)) if fetch_next else None
            g = await w.grad()
            accrued += g
            w.descend(g)
            if (t + 1) % self.n_push == 0 or w.is_last(t):
                if sent is not None:  # the push before this one, which was under way meanwhile
                    await sent
                sent = await w.begin(w.push(SERVER, accrued.clone() if self.overlap else accrued))
                if not self.overlap:
                    await sent
                    sent = None
                accrued.zero_()

    async def finish(self, w: Node) -> None:
        if w.unmerged:  # the loop ended where nobody could have known
            await w.push(SERVER, w.keep("accrued", torch.zeros_like(w.x)))
        await w.take_result()

    async def server(self, s: Node) -> None:
        memory = s.keep("memory", torch.zeros_like(s.x), shared=True)  # squares, or velocity
        early: dict[int, Message] = {}
        async for m in s.inbox():
            if isinstance(m, Pull):
                early[m.src] = m
            elif isinstance(m, Push):
                self._apply(s, m, memory)
                s.advance(m.count)
            warm = s.version >= self.warm_start or 0 not in s.active
            for rank in [rank for rank in early if warm or rank == 0]:
                await s.reply(early.pop(rank), s.x)

    def optimizer_steps(self, workers: int) -> float:
        return 1  # workers step, too, and the server's optimizer takes their counts over

    @property
    def steps_at_server(self) -> bool:
        return self.optimizer is None

    @property
    def one_rate(self) -> bool:
        return self.optimizer is not None

    @property
    def mixes_steps(self) -> bool:
        return self.n_push > 1

    @property
    def deal(self) -> Deal:
        return Deal(fixed=self.fixed_shares)

    def _apply(self, s: Node, push: Push, memory: Tensor) -> None:
        """One step of the server's optimizer."""
        default = 0 if self.optimizer is None else WARMUP
        warmup = default if self.warmup is None else self.warmup
        ramp = min(1.0, (s.version + 1) / warmup) if warmup else 1.0
        rate = ramp * (push.rate if self.rate is None else self.rate)
        if self.optimizer is None:
            s.descend(push.body, push, scale=ramp)
        elif self.optimizer == "sgd":
            s.x.sub_(push.body, alpha=rate)
        elif self.optimizer == "momentum":
            s.x.sub_(memory.mul_(self.momentum).add_(push.body), alpha=rate)
        else:
            memory.addcmul_(push.body, push.body)
            s.x.addcdiv_(push.body, memory.sqrt().add_(self.eps), value=-rate)
