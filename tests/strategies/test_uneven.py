"""Workers whose data ends at different times: nobody waits in vain, and every sample counts by its weight."""

from dataclasses import dataclass

import pytest
import torch

from shoal.core.replica import NoMoreSteps
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Simulation
from shoal.strategies import (
    BMUF,
    DecoupledMomentum,
    DiLoCo,
    Local,
    PostLocal,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
    Sync,
)
from shoal.testing.problems import Quadratic, VectorReplica, simulate
from shoal.vocabulary.node import Node

AVERAGING = [
    Sync(),
    Local(period=4),
    Local(period=4, warmup=3),
    Local(period=4, penalty=1.0),
    BMUF(period=4, warmup=6),
    BMUF(period=3, warmup=0, nesterov=False),
    DiLoCo(period=5),
    DiLoCo(period=2, warmup=3),
    PostLocal(switch=6, period=3),
    SlowMo(period=4),
    StreamingDiLoCo(period=4, fragments=1, overlap=1),
    StreamingDiLoCo(period=4, fragments=1, eager=True),
    DecoupledMomentum(),
    SparseLoCo(period=4),
    SparseLoCo(period=4, merge="all"),
]


@dataclass(frozen=True)
class Ending(Quadratic):
    """Worker k's loop ends after ends[k] steps."""

    ends: tuple[int, ...] = ()

    def replica(self, rank, start):
        replica = super().replica(rank, start)
        compute = replica.gradient

        async def gradient():
            if replica._step >= self.ends[rank]:
                raise NoMoreSteps
            return await compute()

        replica.gradient = gradient
        return replica


def train(strategy, ends, **options):
    problem = Ending(lr=0.25, targets=(0.0, 4.0, -3.0), counts=(1, 2, 4), ends=ends)
    start = torch.tensor([8.0], dtype=torch.float64)
    return Simulation(
        strategy,
        lambda rank: problem.replica(rank, start),
        workers=len(ends),
        steps=None,
        compute=Compute(1.0, slow={0: 3.0}),
        **options,
    ).run()


@pytest.mark.parametrize("strategy", AVERAGING, ids=repr)
@pytest.mark.parametrize("ends", [(7, 7, 7), (0, 5, 9), (13, 2, 6), (1, 12, 0), (0, 0, 0)], ids=str)
def test_all_end_with_the_same_model_and_every_sample_in_it(strategy, ends):
    run = train(strategy, ends)
    solutions = {strategy.solution(Node(run.worker(k))).item() for k in range(3)}
    assert len(solutions) == 1
    samples = sum(n * count for n, count in zip(ends, (1, 2, 4), strict=True))
    assert {run.worker(k).merged for k in range(3)} == {samples}


def test_synchronous_steps_are_of_those_who_still_have_data():
    x = 8.0
    for step in range(5):
        present = [(n, a) for n, a, end in ((1, 0, 2), (2, 4, 5), (4, -3, 3)) if step < end]
        x -= 0.25 * sum(n * (x - a) for n, a in present) / sum(n for n, _ in present)
    run = train(Sync(), (2, 5, 3))
    assert [run.worker(k).x.item() for k in range(3)] == pytest.approx([x] * 3, rel=1e-15)


def test_a_block_is_weighed_by_the_steps_that_each_worker_did_in_it():
    # blocks of 4; worker 0 ends in the midst of the first, worker 1 with the second's first step
    def local(x, target, steps):
        for _ in range(steps):
            x -= 0.25 * (x - target)
        return x

    x = 8.0
    for done in ((3, 4), (0, 1)):
        counts = [1 * done[0], 2 * done[1]]
        moved = [local(x, 0.0, done[0]) - x, local(x, 4.0, done[1]) - x]
        x += sum(n * m for n, m in zip(counts, moved, strict=True)) / sum(counts)
    run = train(Local(period=4), (3, 5))
    assert [run.worker(k).x.item() for k in range(2)] == pytest.approx([x] * 2, rel=1e-15)


@pytest.mark.parametrize("strategy", [Sync(), PostLocal(switch=6, period=3), SlowMo(period=4)], ids=repr)
def test_a_falling_rate_does_not_part_who_ended_early_from_the_others(strategy):
    class Falling(VectorReplica):
        lr = property(lambda self: 0.25 * 0.9**self._step, lambda self, value: None)

        def descend(self, g):
            self.x.sub_(g, alpha=self.lr)

    problem, start = Quadratic(targets=(0.0, 4.0, -3.0), counts=(1, 2, 4)), torch.tensor([8.0])

    def replica(rank):
        falling = Falling(problem, rank, start.clone())
        compute = falling.gradient

        async def gradient():
            if falling._step >= (6, 30, 30)[rank]:
                raise NoMoreSteps
            return await compute()

        falling.gradient = gradient
        return falling

    run = Simulation(strategy, replica, workers=3, steps=None).run()
    assert len({strategy.solution(Node(run.worker(k))).item() for k in range(3)}) == 1


class Averages(Instrument):
    """How many messages of averages are sent."""

    def __init__(self):
        self.sent = 0

    def send(self, node, dst, m):
        self.sent += m.tag == "stripe"


@pytest.mark.parametrize("strategy", [Local(period=4), BMUF(period=4, warmup=0), DiLoCo(period=4)], ids=repr)
@pytest.mark.parametrize(("ends", "averages"), [((8, 8, 8), 2), ((4, 8, 6), 2), ((9, 8, 8), 3)], ids=str)
def test_nothing_is_averaged_when_all_have_ended(strategy, ends, averages):
    seen, one = Averages(), Averages()
    train(strategy, ends, observers=[seen])
    simulate(strategy, Quadratic(), workers=3, steps=4, observers=[one])
    assert one.sent > 0
    assert seen.sent == averages * one.sent
