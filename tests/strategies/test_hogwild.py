"""Hogwild!: worked out on paper, and its identities."""

from collections import Counter

import pytest
import torch
from central import Census, Drawn, mean_staleness

from shoal.codecs import FP16
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import ASGD, Hogwild, Single
from shoal.testing.problems import Problem, Quadratic, Slope, simulate


class Seats(Problem):
    """Worker k's loss depends on element k alone: supports do not overlap."""

    def gradient(self, rank, step, x):
        g = torch.zeros_like(x)
        g[rank] = torch.sin(x[rank] + step) / 3
        return g


class Ends(Instrument):
    """Where each worker's x stands after each step: the vector it read for it, and its own step."""

    def __init__(self):
        self.x = {}

    def step(self, node):
        self.x.setdefault(node.rank, []).append(node.x.item())


def staleness(run):
    """Of all workers together: the server takes no part, so it cannot know."""
    return sum((run.worker(k).meter.staleness for k in range(run.workers)), Counter())


def test_three_workers_at_their_own_pace_by_hand():
    # Gradients take 1, 1.25 and 2.125 s, memory is at hand; the workers' minima are 0, 4 and -8.
    x0 = 8.0
    x1 = x0 - 0.5 * (x0 - 0)  # 1.000 s  worker 0
    x2 = x1 - 0.5 * (x0 - 4)  # 1.250 s  worker 1 saw x0: 1 behind
    x3 = x2 - 0.5 * (x1 - 0)  # 2.000 s  worker 0 saw x1: 1 behind
    x4 = x3 - 0.5 * (x0 + 8)  # 2.125 s  worker 2 saw x0: 3 behind
    x5 = x4 - 0.5 * (x2 - 4)  # 2.500 s  worker 1 saw x2: 2 behind
    x6 = x5 - 0.5 * (x4 + 8)  # 4.250 s  worker 2 saw x4: 1 behind
    ends = Ends()
    run = simulate(
        Hogwild(),
        Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0)),
        workers=3,
        steps=2,
        start=[x0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 2.125}),
        observers=[ends],
    )
    assert ends.x == {
        0: [x0 - 0.5 * (x0 - 0), x1 - 0.5 * (x1 - 0)],
        1: [x0 - 0.5 * (x0 - 4), x2 - 0.5 * (x2 - 4)],
        2: [x0 - 0.5 * (x0 + 8), x4 - 0.5 * (x4 + 8)],
    }
    assert run.server.x.item() == x6 == -7.0
    late = [dict(run.worker(k).meter.staleness) for k in range(3)]
    assert late == [{0: 1, 1: 1}, {1: 1, 2: 1}, {3: 1, 1: 1}]
    assert [run.worker(k).x.item() for k in range(3)] == [x6, x6, x6]


def test_reading_and_adding_take_a_trip_there_and_one_back_by_hand():
    # A trip takes 1/4 s, a gradient 1 s: worker 0 reads the memory at 0.25 s, has it at 0.5 s, adds to it at
    # 1.75 s, is told so at 2 s, reads x1 at 2.25 s. Worker 1's gradient takes 1.75 s: it adds at 2.5 s.
    x1 = 8 - 0.5 * 8
    x2 = x1 - 0.5 * 8
    x3 = x2 - 0.5 * x1  # 3.75 s  worker 0, 1 behind
    x4 = x3 - 0.5 * x2  # 5.25 s  worker 1 read at 3 s: 1 behind
    run = simulate(
        Hogwild(),
        Quadratic(lr=0.5),
        workers=2,
        steps=2,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.75}),
        network=Network(latency=0.25),
    )
    assert run.server.x.item() == x4 == -2.0
    assert staleness(run) == {0: 1, 1: 3}


def test_one_worker_is_serial_sgd():
    problem, start = Drawn(lr=0.1), [0.3, 0.7, -0.2]
    serial = simulate(Single(), problem, steps=20, start=start)
    alone = simulate(Hogwild(), problem, steps=20, start=start)
    assert torch.allclose(alone.server.x, serial.worker(0).x, rtol=0, atol=20 * 1e-16)  # a rounding a step


def test_one_worker_is_serial_sgd_bit_for_bit_where_the_numbers_are_short():
    problem = Quadratic(lr=0.5, targets=(3.0,))
    serial = simulate(Single(), problem, steps=20, start=[8.0, -1.0])
    alone = simulate(Hogwild(), problem, steps=20, start=[8.0, -1.0], network=Network(latency=0.3))
    assert torch.equal(alone.server.x, serial.worker(0).x)


def test_with_memory_at_hand_it_is_asynchronous_sgd():
    options = {"workers": 4, "steps": 6, "start": [8.0, -3.0], "compute": Compute(mean=1.0, jitter=0.4)}
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0))
    here, there = simulate(Hogwild(), problem, **options), simulate(ASGD(), problem, **options)
    assert torch.equal(here.server.x, there.server.x)
    assert staleness(here) == there.server.meter.staleness


@pytest.mark.parametrize("seed", range(4))
def test_disjoint_supports_give_the_serial_result_exactly_in_any_order(seed):
    start, problem = [0.3, 0.7, -0.2, 1.9], Seats(lr=0.5)
    serial = torch.tensor(start, dtype=torch.float64)
    for rank in range(4):  # one after the other, on one machine
        for step in range(7):
            serial -= 0.5 * problem.gradient(rank, step, serial)
    run = simulate(
        Hogwild(),
        problem,
        workers=4,
        steps=7,
        start=start,
        compute=Compute(mean=1.0, jitter=0.8, slow={2: 4.0}),
        network=Network(latency=0.2, bandwidth=1e3),
        seed=seed,
    )
    assert torch.equal(run.server.x, serial)


def test_a_rate_of_zero_leaves_the_memory_untouched():
    run = simulate(Hogwild(), Drawn(lr=0.0), workers=3, steps=4, start=[0.1, 0.7], compute=Compute(1.0, 0.4))
    assert run.server.x.tolist() == [0.1, 0.7]


@pytest.mark.parametrize("workers", [2, 4])
def test_equal_workers_are_behind_by_one_addition_of_each_other_worker(workers):
    # mean staleness tends to N - 1
    compute = Compute(mean=1.0, jitter=0.1)
    run = simulate(Hogwild(), Slope(lr=0.0), workers=workers, steps=25, compute=compute)
    assert sum(staleness(run).values()) == 25 * workers
    assert mean_staleness(staleness(run)) == pytest.approx(workers - 1, abs=0.25)
    assert not run.server.meter.staleness


def test_the_server_counts_what_it_is_told_of():
    run = simulate(Hogwild(), Slope(counts=(1, 3)), workers=2, steps=4, compute=Compute(1.0, jitter=0.3))
    assert (run.server.version, run.server.merged) == (8, 4 * (1 + 3))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("step", [0, 2])
def test_every_batch_is_in_the_memory_once_though_a_worker_dies(step, shards):
    run = simulate(
        Hogwild(),
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        shards=shards,
        compute=Compute(mean=1.0, jitter=0.3),
        network=Network(latency=0.1),
        faults=Faults().crash(rank=1, step=step),
    )
    assert run.solution.tolist() == [1.0] * 12
    assert run.worker(0).x.tolist() == run.worker(2).x.tolist() == [1.0] * 12


def test_a_codec_that_would_do_nothing_is_refused():
    with pytest.raises(ValueError, match="Hogwild adds to memory as it is"):
        simulate(Hogwild(), Slope(), workers=2, codec=FP16())
