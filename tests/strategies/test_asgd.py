"""Asynchronous SGD: worked out on paper, and its identities."""

import pytest
import torch
from central import Census, Drawn, Trail, mean_staleness

from shoal.sim import Compute, Faults, Network
from shoal.strategies import ASGD, Downpour, Single
from shoal.testing.problems import Quadratic, Slope, simulate


def test_three_workers_at_their_own_pace_by_hand():
    # Gradients take 1, 1.25 and 2.125 s, messages no time; the workers' minima are 0, 4 and -8.
    x0 = 8.0
    x1 = x0 - 0.5 * (x0 - 0)  # 1.000 s  worker 0, none behind
    x2 = x1 - 0.5 * (x0 - 4)  # 1.250 s  worker 1 saw x0: 1 behind
    x3 = x2 - 0.5 * (x1 - 0)  # 2.000 s  worker 0 saw x1: 1 behind
    x4 = x3 - 0.5 * (x0 + 8)  # 2.125 s  worker 2 saw x0: 3 behind
    x5 = x4 - 0.5 * (x2 - 4)  # 2.500 s  worker 1 saw x2: 2 behind
    x6 = x5 - 0.5 * (x3 - 0)  # 3.000 s  worker 0 saw x3: 2 behind
    x7 = x6 - 0.5 * (x5 - 4)  # 3.750 s  worker 1 saw x5: 1 behind
    x8 = x7 - 0.5 * (x4 + 8)  # 4.250 s  worker 2 saw x4: 3 behind
    x9 = x8 - 0.5 * (x8 + 8)  # 6.375 s  worker 2 saw x8: none behind
    trail = Trail()
    run = simulate(
        ASGD(),
        Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0)),
        workers=3,
        steps=3,
        start=[x0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 2.125}),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3, x4, x5, x6, x7, x8, x9]
    assert x9 == -4.75
    assert run.server.meter.staleness == {0: 2, 1: 3, 2: 2, 3: 2}
    assert (run.server.version, run.server.merged, run.seconds) == (9, 9.0, 6.375)
    assert [run.worker(k).x.item() for k in range(3)] == [x9, x9, x9]


@pytest.mark.parametrize("steps", [1, 20])
def test_one_worker_is_serial_sgd_bit_for_bit(steps):
    problem = Drawn(lr=0.1)
    serial = simulate(Single(), problem, steps=steps, start=[0.3, 0.7, -0.2])
    alone = simulate(ASGD(), problem, steps=steps, start=[0.3, 0.7, -0.2], network=Network(latency=0.5))
    assert torch.equal(alone.server.x, serial.worker(0).x)
    assert alone.server.meter.staleness == {0: steps}


def test_downpour_that_fetches_and_pushes_at_every_step_is_the_same_algorithm():
    options = {
        "workers": 3,
        "steps": 8,
        "start": [0.9, -0.4],
        "compute": Compute(mean=1.0, jitter=0.3),
        "network": Network(latency=0.1, bandwidth=1e4),
    }
    problem = Drawn(lr=0.1)
    downpour = simulate(Downpour(warmup=0), problem, **options)
    assert torch.equal(simulate(ASGD(), problem, **options).server.x, downpour.server.x)


def test_a_rate_of_zero_leaves_the_model_untouched():
    compute = Compute(mean=1.0, jitter=0.3)
    run = simulate(ASGD(), Drawn(lr=0.0), workers=3, steps=5, start=[0.1, 0.7], compute=compute)
    assert run.server.x.tolist() == [0.1, 0.7]
    assert run.server.version == 15


def test_every_gradient_counts_in_full_however_many_samples_are_behind_it():
    # the rate is per push: the samples are only counted
    run = simulate(ASGD(), Slope(lr=0.5, gradients=(1.0, 10.0), counts=(1, 3)), workers=2, steps=4)
    assert run.server.x.item() == -0.5 * 4 * 1 - 0.5 * 4 * 10
    assert run.server.merged == 4 * 1 + 4 * 3


@pytest.mark.parametrize("workers", [2, 4])
def test_equal_workers_are_behind_by_one_push_of_each_other_worker(workers):
    compute = Compute(mean=1.0, jitter=0.1)
    run = simulate(ASGD(), Slope(lr=0.0), workers=workers, steps=20, compute=compute)
    assert sum(run.server.meter.staleness.values()) == 20 * workers
    assert mean_staleness(run.server.meter.staleness) == pytest.approx(workers - 1, abs=0.25)


def test_nobody_waits_for_the_slow():
    compute = Compute(mean=1.0, slow={1: 10.0})
    run = simulate(ASGD(), Slope(), workers=2, steps=3, compute=compute)
    assert run.server.meter.staleness == {0: 5, 3: 1}  # its first gradient is behind by all the other's
    assert run.worker(0).meter.wait_seconds == 27.0  # at the very end only, for work that might be left


def test_the_batch_of_a_worker_that_dies_is_done_by_another_by_hand():
    # Gradients take 1 and 1.25 s. Worker 1 dies at 1.25 s in its second and last; at 2.25 s it is missed.
    x1 = 8 - 0.5 * (8 - 0)  # 1.00 s  worker 0
    x2 = x1 - 0.5 * (8 - 4)  # 1.25 s  worker 1 saw 8, sees x2 and dies
    x3 = x2 - 0.5 * (x1 - 0)  # 2.00 s  worker 0 saw x1, and asks for more
    x4 = x3 - 0.5 * (x3 - 4)  # 3.25 s  worker 0 saw x3 when it got worker 1's batch
    trail = Trail()
    run = simulate(
        ASGD(),
        Quadratic(lr=0.5, targets=(0.0, 4.0)),
        workers=2,
        steps=2,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults().crash(rank=1, step=1),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3, x4] == [4.0, 2.0, 0.0, 2.0]
    assert run.seconds == 3.25
    assert run.server.meter.faults == ["worker 1 was lost"]


@pytest.mark.parametrize("step", [0, 2, 5])
def test_every_batch_is_in_the_model_once_though_a_worker_dies(step):
    run = simulate(
        ASGD(),
        Census(steps=6),
        workers=3,
        steps=6,
        start=[0.0] * 18,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=1, step=step),
    )
    assert run.server.x.tolist() == [1.0] * 18


def test_samples_are_counted_by_whose_batch_it_was_and_not_by_who_did_it():
    # worker 1's batches have three samples each, also the two that worker 0 does for it
    faults = Faults().crash(rank=1, step=1)
    run = simulate(ASGD(), Slope(counts=(1, 3)), workers=2, steps=3, compute=Compute(1.0), faults=faults)
    assert run.server.merged == 3 * 1 + 3 * 3


def test_the_run_ends_when_every_worker_has_died():
    faults = Faults().crash(rank=0, step=1).crash(rank=1, step=3)
    run = simulate(ASGD(), Slope(), workers=2, steps=5, compute=Compute(1.0), faults=faults)
    assert run.server.x.item() == -1.0 - 3.0
