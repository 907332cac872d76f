"""Delay-compensated asynchronous SGD: an old gradient is corrected for its age (Zheng et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.limits import at_least, between
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class DCASGD(Central):
    """The server adds lambda g g (x - what the worker pulled) to g: a cheap guess of how g has changed."""

    strength: float | None = None  # lambda_0; None: 2 if adaptive, else 0.04
    adaptive: bool = True  # divide lambda by the root of the gradients' mean square
    decay: float = 0.95  # m: of the mean square

    def __post_init__(self) -> None:
        at_least(0, strength=self.strength)
        between(0, 1, decay=self.decay)

    async def server(self, s: Node) -> None:
        square = s.keep("mean square", torch.zeros_like(s.x), shared=True)
        pulls = s.keep("pulls", torch.zeros(s.size, 2, dtype=torch.int64))  # by worker: number, version
        async for m in s.inbox():
            if isinstance(m, Pull):
                pulled = s.keep(f"pulled by {m.src}", s.x)
                if m.seq > pulls[m.src, 0]:  # else it asks again: it gets what it may have got already
                    pulled.copy_(s.x)
                    pulls[m.src] = torch.tensor([m.seq, s.version])
                await s.reply(m, pulled, int(pulls[m.src, 1]))
            elif isinstance(m, Push):
                g = m.body
                delay = s.x - s.keep(f"pulled by {m.src}", s.x)
                correction = delay.mul_(g).mul_(g).mul_(self._strength())
                if self.adaptive and m.count:  # not where mixed precision overflowed
                    square.mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
                if self.adaptive:
                    correction.div_((square + 1e-7).sqrt_())
                s.descend(correction.add_(g), m)
                s.advance(m.count)

    def _strength(self) -> float:
        default = 2.0 if self.adaptive else 0.04
        return default if self.strength is None else self.strength
