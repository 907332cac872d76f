"""Workers whose own training loops end at different steps, as nobody could have known beforehand."""

import torch

from shoal.core.replica import NoMoreSteps
from shoal.sim import Simulation


def simulate_loops(strategy, problem, lengths, start=(0.0,), **options):
    """Run a strategy whose worker k has `lengths[k]` batches; nobody knows when it will end."""
    begin = torch.tensor(start, dtype=torch.float64)

    def replica(rank):
        made = problem.replica(rank, begin)
        gradient = made.gradient

        async def until_the_end():
            if made._step == lengths[rank]:
                raise NoMoreSteps
            return await gradient()

        made.gradient = until_the_end
        return made

    simulation = Simulation(strategy, replica, workers=len(lengths), steps=None, **options)
    return simulation.run()
