"""DelayedNesterov: a server's momentum that takes a step with every N-th displacement (Liu et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.vocabulary.node import Node


class DelayedNesterov:
    """The server's outer optimizer. Displacements count as they come, the momentum once for `length` of them.

    `activation` is the momentum's share in all others: 0, up to 1 / `length`.
    """

    def __init__(self, s: Node, rate: float, momentum: float, length: int, activation: float = 0.0) -> None:
        self._node, self._rate, self._momentum = s, rate, momentum  # epsilon, beta
        self._length, self._activation = length, activation  # N, c
        self._velocity = s.keep("velocity", torch.zeros_like(s.x), shared=True)  # m
        self._delayed = s.keep("delayed", torch.zeros_like(s.x), shared=True)  # Delta
        self._arrivals = s.keep("arrivals", torch.tensor(0), shared=True)  # t

    def step(self, displacement: Tensor) -> None:
        """Move the server's model by one displacement."""
        share = self._activation
        self._delayed += displacement
        self._arrivals += 1
        if self._arrivals % self._length == 0:
            self._velocity.mul_(self._momentum).add_(self._delayed, alpha=1 / self._length)
            self._delayed.zero_()
            share = 1 - share * (self._length - 1)
        x = self._node.x
        x.sub_(self._velocity, alpha=self._rate * share * self._momentum)
        x.sub_(displacement, alpha=self._rate / self._length)
