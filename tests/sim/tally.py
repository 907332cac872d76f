"""Tally: a model that counts how often each sample is in it, exactly, whoever comes and goes."""

import torch

from marks import Tally
from shoal.core.replica import Gradient
from shoal.replicas.batches import Batches
from shoal.sim import Compute, Faults, Simulation


class TallyReplica:
    """Its gradient counts the samples of the batch, downwards: the model goes up by one for each."""

    lr = 1.0
    changed = None

    def __init__(self, rank, workers, samples, batch, seed, fixed=False):
        self.x = torch.zeros(samples, dtype=torch.float64)
        ids = torch.arange(samples)
        self.batches = Batches(ids, ids, batch=batch, rank=rank, workers=workers, seed=seed, fixed=fixed)

    async def gradient(self):
        ids, _ = self.batches.next()
        return Gradient(-torch.bincount(ids, minlength=len(self.x)).double(), len(ids), None)

    def descend(self, g):
        self.x -= g

    def seek(self, owner, place):
        self.batches.seek(owner, place)

    def reset_momentum(self):
        pass

    def state_dict(self):
        return {"position": self.batches.position}

    def load_state_dict(self, state):
        self.batches.position = state["position"]

    def redeal(self, *change):
        self.batches.redeal(*change)

    def end_of(self, passes):
        return self.batches.end_of(passes)

    def deal(self):
        return self.batches.deal()

    def take_deal(self, deal):
        self.batches.take_deal(deal)


class Stuck(Exception):
    """A run was not over long after the last fault."""


def tally(
    faults=None,
    *,
    workers=4,
    samples=50,
    batch=3,
    epochs=2,
    period=1,
    seed=0,
    strategy=None,
    before=None,
    elastic=True,
    **options,
):
    """Run it, and return the simulation. Raises Stuck if it is not over after LONG virtual seconds.

    `before` is called with the nodes before they begin.
    """
    fixed = strategy is not None and strategy.deal.fixed
    first = TallyReplica(0, workers, samples, batch, seed, fixed)
    run = Simulation(
        strategy or Tally(period),
        lambda rank: TallyReplica(rank, workers, samples, batch, seed, fixed),
        workers=workers,
        steps=first.batches.end_of(epochs),
        passes=epochs,
        compute=options.pop("compute", None) or Compute(mean=1.0, jitter=0.1),
        faults=faults or Faults(),
        seed=seed,
        elastic=elastic,
        **options,
    )

    def give_up():
        raise Stuck(f"not over after {LONG:g} s")

    run.kernel.at(LONG, give_up)
    if before is not None:
        before(run.nodes)
    return run.run()


LONG = 1000.0


def at_the_end(run):
    """The workers that got to the end."""
    nodes = [run.nodes[rank] for rank in run.finished if rank < run.workers]
    return [node for node in nodes if not node.membership.is_joining]
