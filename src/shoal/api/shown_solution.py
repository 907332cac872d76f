"""ShownSolution: what all workers have learnt together, shown in one worker's model inside its loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


class ShownSolution:
    """The server's model, that of the last merge, or where there is neither this worker's own."""

    def __init__(self, engine: Engine, replica: AttachedReplica, strategy: Strategy) -> None:
        self.is_shown = False
        self._engine = engine
        self._replica = replica
        self._strategy = strategy

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Inside the block the worker's model has it; afterwards it is as it was."""
        self._replica.enter()  # what the loop has changed since the last step comes back afterwards
        own, outside, self.is_shown = self._replica.x.clone(), self.is_shown, True
        try:
            self._show(self._solution())
            yield
        finally:
            self._show(own)
            self.is_shown = outside

    @torch.no_grad()
    def _show(self, solution: Tensor) -> None:
        """Have the model compute with these parameters."""
        self._replica.x.copy_(solution)
        self._replica.agree()

    def _solution(self) -> Tensor:
        if self._strategy.servers:
            return drive(self._engine.client.look())
        return self._strategy.solution(Node(self._engine))
