"""Workers that add up a vector each, in virtual time."""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.collectives import ALGORITHMS
from shoal.core.replica import Parameters
from shoal.engine.engine import Instrument
from shoal.sim import Simulation
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Adds(Strategy):
    """Each worker's vector becomes the sum of all, as often as told."""

    by: Any = None
    times: int = 1

    async def worker(self, w):
        for _ in range(self.times):
            await self.by(w.engine.group, w.x)


def add(by, vectors, times=1, **options) -> Simulation:
    """A finished simulation of sums by this algorithm, or by the one of that name."""
    algorithm = ALGORITHMS[by].sum if isinstance(by, str) else by
    return Simulation(
        Adds(algorithm, times),
        lambda rank: Parameters(vectors[rank].clone()),
        workers=len(vectors),
        steps=1,
        **options,
    ).run()


def zeros(workers, elements):
    """A vector of doubles for each."""
    return [torch.zeros(elements, dtype=torch.float64)] * workers


class Arrivals(Instrument):
    """How many messages each worker has taken in."""

    def __init__(self):
        self.messages = {}

    def receive(self, node, m):
        self.messages[node.rank] = self.messages.get(node.rank, 0) + 1
