"""Workers that average a vector each by sparse doubling, in virtual time."""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.codecs import Sparse
from shoal.collectives import SparseDoubling
from shoal.core.replica import Parameters
from shoal.sim import Simulation
from shoal.vocabulary.strategy import Strategy

DOUBLING = SparseDoubling(Sparse())


@dataclass(frozen=True)
class Averaging(Strategy):
    """Each worker's vector becomes the average of all, and notes the total weight."""

    weights: Any = None
    times: int = 1

    async def worker(self, w):
        for _ in range(self.times):
            weight = 1.0 if self.weights is None else self.weights[w.rank]
            average, total = await w.engine.averages._mean(w.engine.group, w.x, weight)
            w.x.copy_(average)
            w.keep("total", torch.tensor([total], dtype=torch.float64))


def average(vectors, codec=None, mean=DOUBLING, weights=None, times=1, **options):
    """A finished simulation in which all workers have the average of these vectors."""
    return Simulation(
        Averaging(weights, times),
        lambda rank: Parameters(vectors[rank].clone()),
        workers=len(vectors),
        steps=1,
        codec=codec or Sparse(),
        mean=mean,
        **options,
    ).run()
