"""Staleness-aware asynchronous SGD: worked out on paper, and its identities."""

import pytest
import torch
from central import Census, Drawn, Trail

from shoal.sim import Compute, Faults, Link, Network
from shoal.strategies import ASGD, Single, StalenessAware
from shoal.testing.problems import Quadratic, Slope, simulate


def test_three_workers_at_their_own_pace_by_hand():
    # Gradients take 1, 1.25 and 2.125 s, messages no time; the workers' minima are 0, 4 and -8.
    x0 = 8.0
    x1 = x0 - 0.75 * (x0 - 0)  # 1.000 s  worker 0, none behind
    x2 = x1 - 0.75 * (x0 - 4)  # 1.250 s  worker 1 saw x0: 1 behind, which costs nothing
    x3 = x2 - 0.75 * (x1 - 0)  # 2.000 s  worker 0 saw x1: 1 behind
    x4 = x3 - 0.75 / 3 * (x0 + 8)  # 2.125 s  worker 2 saw x0: 3 behind
    x5 = x4 - 0.75 / 2 * (x2 - 4)  # 2.500 s  worker 1 saw x2: 2 behind
    x6 = x5 - 0.75 * (x4 + 8)  # 4.250 s  worker 2 saw x4: 1 behind
    trail = Trail()
    run = simulate(
        StalenessAware(),
        Quadratic(lr=0.75, targets=(0.0, 4.0, -8.0)),
        workers=3,
        steps=2,
        start=[x0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 2.125}),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3, x4, x5, x6]
    assert x6 == -5.75
    assert run.server.meter.staleness == {0: 1, 1: 3, 2: 1, 3: 1}


def test_one_worker_is_serial_sgd_bit_for_bit():
    problem, start = Drawn(lr=0.1), [0.3, 0.7]
    serial = simulate(Single(), problem, steps=20, start=start)
    alone = simulate(StalenessAware(), problem, steps=20, start=start)
    assert torch.equal(alone.server.x, serial.worker(0).x)


def test_it_is_asynchronous_sgd_where_no_gradient_is_more_than_one_version_behind():
    options = {"workers": 2, "steps": 2, "start": [0.9, -0.4], "compute": Compute(1.0, slow={1: 1.5})}
    aware = simulate(StalenessAware(), Drawn(lr=0.1), **options)
    assert aware.server.meter.staleness == {0: 1, 1: 3}
    assert aware.digest() == simulate(ASGD(), Drawn(lr=0.1), **options).digest()


def test_it_is_not_where_one_is_two_versions_behind():
    options = {"workers": 2, "steps": 4, "start": [0.9, -0.4], "compute": Compute(1.0, slow={1: 2.5})}
    aware = simulate(StalenessAware(), Drawn(lr=0.1), **options)
    assert aware.server.meter.staleness[2] > 0
    assert aware.digest() != simulate(ASGD(), Drawn(lr=0.1), **options).digest()


@pytest.mark.parametrize("seed", range(3))
def test_each_gradient_goes_as_far_as_its_own_age_allows(seed):
    # all gradients are 1, so the way is the sum of the rates
    run = simulate(
        StalenessAware(),
        Slope(lr=0.5),
        workers=4,
        steps=6,
        compute=Compute(mean=1.0, jitter=0.5),
        network=Network(latency=0.1),
        seed=seed,
    )
    histogram = run.server.meter.staleness
    assert max(histogram) > 2
    way = sum(pushes * 0.5 / max(1, late) for late, pushes in histogram.items())
    assert run.server.x.item() == pytest.approx(-way, rel=1e-12)


def test_each_shard_goes_by_its_own_versions():
    # All saw version 0 of both shards. Gradients 1, 2 and 4 come to the first shard in that order, to the
    # second in the opposite one: what comes third is 2 behind and counts for half.
    slow, middle, fast = Link(latency=0.3), Link(latency=0.25), Link(latency=0.1)
    links = {(0, 3): fast, (1, 3): middle, (2, 3): slow, (0, 4): slow, (1, 4): middle, (2, 4): fast}
    run = simulate(
        StalenessAware(),
        Slope(gradients=(1.0, 2.0, 4.0)),
        workers=3,
        start=[0.0, 0.0],
        shards=2,
        compute=Compute(mean=1.0),
        network=Network(links=links),
    )
    assert run.solution.tolist() == [-(1 + 2 + 4 / 2), -(4 + 2 + 1 / 2)]


def test_every_batch_is_in_the_model_though_a_worker_dies():
    run = simulate(
        StalenessAware(),
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=2, step=1),
    )
    assert all(0 < share <= 1 for share in run.server.x.tolist())
    assert (run.server.version, run.server.merged) == (12, 12.0)
    assert run.server.meter.faults == ["worker 2 was lost"]
