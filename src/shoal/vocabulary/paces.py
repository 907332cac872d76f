"""Paces: how fast workers are, and how many local steps each should take to be done together."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import torch

from shoal.core.transport import Message
from shoal.vocabulary.node import Node

PACE = "pace"
ROUNDING = 1e-6  # equal paces may differ in their last bits


class Paces:
    """What one worker knows of everybody's seconds a step. Nobody waits for news of it."""

    def __init__(self, w: Node) -> None:
        self._node = w
        self._known = w.keep("paces", torch.zeros(w.size, dtype=torch.float64), mutual=True)  # 0: unknown
        self._since = w.compute_seconds, w.t

    def begin(self) -> None:
        """A round begins with the step at hand."""
        self._since = self._node.compute_seconds, self._node.t

    async def tell(self) -> None:
        """Tell all others how fast this worker was since the round, or this process, began."""
        w, (seconds, step) = self._node, self._since
        pace = (w.compute_seconds - seconds) / (w.t + 1 - step)
        self._known[w.rank] = pace
        for rank in w.others:
            await w.send(rank, Message(PACE, rate=pace))

    def steps(self, period: int, rounded: Callable[[float], int] = floor) -> int:
        """Local steps of the next round: fewer than `period`, the slower this worker is than the fastest.

        A whole number of them: papers differ in whether it is `rounded` down or up.
        """
        w = self._node
        for m in w.poll(PACE):
            self._known[m.src] = m.rate
        own = float(self._known[w.rank])
        known = [float(self._known[k]) for k in (w.rank, *w.others) if self._known[k] > 0]
        if own <= 0:
            return period
        steps = period * min(known) / own
        return max(1, rounded(steps + (ROUNDING if rounded is floor else -ROUNDING)))
