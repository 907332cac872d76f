"""Stale-synchronous parallel: fast workers run ahead, but only so far (Ho et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from shoal.core.limits import at_least
from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class SSP(Central):
    """No worker reads when it is more than `bound` steps ahead of the slowest.

    Updates at the very edge, `bound` steps ahead, are shown when the slowest has made its step. So a bound
    of 0 is bulk-synchronous, with the updates added up, and no bound is asynchronous SGD.
    """

    bound: int | None = 3  # s; None: no bound

    def __post_init__(self) -> None:
        at_least(0, bound=self.bound)

    async def server(self, s: Node) -> None:
        clocks = s.keep("clocks", torch.zeros(s.size, dtype=torch.int64))  # steps each worker has done
        hidden = s.keep("hidden", torch.zeros_like(s.x), shared=True)
        about_hidden = s.keep("about hidden", torch.zeros(1, 2, dtype=torch.float64), shared=True)
        about = about_hidden[0]  # their clock, their samples
        nowhere = torch.tensor(0.0, dtype=torch.float64)
        furthest = s.keep("edge", nowhere, shared=True)  # it never goes back
        waiting: dict[int, Message] = {}
        async for m in s.inbox():
            if isinstance(m, (Pull, Push)):
                clocks[m.src] = max(int(clocks[m.src]), m.clock)
            edge = self._edge(s, clocks)
            if edge < inf:  # who comes back is taken for one that has done nothing, until its next word
                furthest.clamp_(min=edge)
                edge = float(furthest)
            if about[1] > 0 and about[0] <= edge:
                s.x -= hidden
                s.advance(float(about[1]))
                hidden.zero_()
                about.zero_()
            if isinstance(m, Pull):
                waiting[m.src] = m
            elif isinstance(m, Push) and m.clock > edge:
                self._step_newest(s, m, hidden, hides=True)
                about += torch.tensor([0.0, m.count])
                about[0] = m.clock
            elif isinstance(m, Push):
                if about[1] > 0:
                    self._step_newest(s, m, hidden, hides=False)
                else:
                    s.descend(m.body, m)
                s.advance(m.count)
            for rank in [rank for rank, pull in waiting.items() if pull.clock <= edge]:
                await s.reply(waiting.pop(rank), s.x)

    def _step_newest(self, s: Node, m: Push, hidden: torch.Tensor, hides: bool) -> None:
        """Step the newest model, which has the hidden updates too; show the step, or hide it with them."""
        shown = s.x.clone()
        s.x -= hidden
        newest = s.x.clone()
        s.descend(m.body, m)
        step = newest - s.x
        s.x.copy_(shown)
        (hidden if hides else s.x).add_(step, alpha=1 if hides else -1)

    def _edge(self, s: Node, clocks: torch.Tensor) -> float:
        """How many steps may be done before one has to wait for the slowest."""
        if self.bound is None or not s.active:
            return inf
        return int(clocks[sorted(s.active)].min()) + self.bound
