"""Slopes: a problem whose gradients are given, for trajectories worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.core.replica import Gradient
from shoal.testing.problems import Problem


@dataclass(frozen=True)
class Slopes(Problem):
    """A constant gradient for each worker, element by element."""

    gradients: Sequence[Sequence[float]] = ()

    def gradient(self, rank, step, x):
        return torch.tensor(self.gradients[rank % len(self.gradients)], dtype=x.dtype)


@dataclass(frozen=True)
class Overflowing(Slopes):
    """In step 1 the `overflowing` workers have zeros, of no sample, as in mixed precision."""

    overflowing: Sequence[int] = ()

    def replica(self, rank, start):
        replica = super().replica(rank, start)
        compute = replica.gradient

        async def gradient():
            g = await compute()
            overflows = rank in self.overflowing and replica.state_dict()["step"] == 2
            return Gradient(torch.zeros_like(g.vector), 0, g.loss) if overflows else g

        replica.gradient = gradient
        return replica


@dataclass(frozen=True)
class OneGradient(Overflowing):
    """Gradients in step 0 alone."""

    def gradient(self, rank, step, x):
        return super().gradient(rank, step, x) * (step == 0)
