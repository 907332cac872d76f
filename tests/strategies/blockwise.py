"""What the tests of blockwise strategies share: a problem whose workers differ, and the path of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.engine.engine import Instrument
from shoal.testing.problems import Problem, simulate
from shoal.vocabulary.node import Node


@dataclass(frozen=True)
class Bowls(Problem):
    """Quadratics that differ in curvature and target."""

    curvatures: Sequence[float] = (1.0, 0.5)
    targets: Sequence[float] = (0.0, 4.0)

    def gradient(self, rank, step, x):
        return (x - self.targets[rank % len(self.targets)]) * self.curvatures[rank % len(self.curvatures)]


class Path(Instrument):
    """Where worker 0 stands after each step."""

    def __init__(self):
        self.x = []

    def step(self, node):
        if node.rank == 0:
            self.x.append(node.x.item())


def path(strategy, problem, blocks, workers=2, start=0.0, period=2):
    """Where the workers stand after each block."""
    seen = Path()
    run = simulate(strategy, problem, workers=workers, steps=blocks * period, start=[start], observers=[seen])
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(workers))
    assert torch.equal(run.strategy.solution(Node(run.worker(0))), run.worker(0).x)
    return seen.x[period - 1 :: period]
