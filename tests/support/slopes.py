"""Slopes: a problem whose gradients are given, for trajectories worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.testing.problems import Problem


@dataclass(frozen=True)
class Slopes(Problem):
    """A constant gradient for each worker, element by element."""

    gradients: Sequence[Sequence[float]] = ()

    def gradient(self, rank, step, x):
        return torch.tensor(self.gradients[rank % len(self.gradients)], dtype=x.dtype)
