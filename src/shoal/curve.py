"""Curve: how good the model was along the way, without disturbing the run that is being timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.core.instrument import Instrument
from shoal.core.node import Node
from shoal.core.strategy import Strategy
from shoal.core.task import Data, Task
from shoal.core.vector import trainable
from shoal.modules import evaluate

POINTS = 20
MOST_BYTES = 512 * 2**20


@dataclass
class Snapshot:
    """The model at one moment."""

    seconds: float
    samples: float
    x: Tensor


class Curve(Instrument):
    """Copies the solution at the node that holds it, about twenty times a run; tested when the run is over.

    A large model is copied less often, so that the copies stay below half a gigabyte.
    """

    def __init__(self, strategy: Strategy, samples: float) -> None:
        self.snapshots: list[Snapshot] = []
        self._strategy = strategy
        self._samples = samples
        self._began = 0.0
        self._spacing = samples / POINTS
        self._next = 0.0

    def begin(self, node: Node) -> None:
        """Take the first copy and start the clock, if this node holds the solution."""
        if holds_solution(self._strategy, node):
            self._began = node.transport.now()
            room = max(1, MOST_BYTES // (node.x.numel() * node.x.element_size()))
            self._spacing = self._samples / min(POINTS, room)
            self._take(node)

    def step(self, node: Node) -> None:
        self._look(node)

    def update(self, node: Node) -> None:
        self._look(node)

    def end(self, node: Node) -> None:
        """Take the last copy, if this node holds the solution."""
        if holds_solution(self._strategy, node):
            if self.snapshots and self.snapshots[-1].samples >= node.merged:
                self.snapshots.pop()  # the end is what counts
            self._take(node)

    def evaluate(self, model: nn.Module, task: Task, data: Data) -> list[dict[str, Any]]:
        """Test every copy; the last point is the result of the run. Leaves the last copy in `model`."""
        parameters, layout = trainable(model)
        points = []
        for snapshot in self.snapshots:
            for p, value in zip(parameters, layout.split(snapshot.x).values(), strict=True):
                p.data.copy_(value)
            loss, accuracy = evaluate(model, task, data)
            points.append(
                {
                    "seconds": snapshot.seconds,
                    "samples": snapshot.samples,
                    "test_loss": loss,
                    "test_accuracy": accuracy,
                }
            )
        return points

    def _look(self, node: Node) -> None:
        if node.merged >= self._next and holds_solution(self._strategy, node):
            self._take(node)

    def _take(self, node: Node) -> None:
        seconds = node.transport.now() - self._began
        self.snapshots.append(Snapshot(seconds, node.merged, self._strategy.solution(node).detach().clone()))
        self._next = node.merged + self._spacing


def holder(strategy: Strategy, workers: int) -> int:
    """The rank of the node whose solution is the result: the server where there is one, else worker 0."""
    return workers if strategy.servers else 0


def holds_solution(strategy: Strategy, node: Node) -> bool:
    """Whether this node's solution is the result of the run."""
    return node.rank == holder(strategy, node.size)
