"""Stale-synchronous parallel: worked out on paper, its two ends, and what its bound promises."""

from math import inf

import pytest
import torch
from central import Census, Drawn, Reads, Trail
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Link, Network
from shoal.strategies import ASGD, SSP, Sync
from shoal.testing.problems import Problem, Quadratic, Slope, simulate
from slopes import Overflowing

PACES = Compute(mean=1.0, slow={1: 1.25, 2: 2.125})


class Own(Problem):
    """Worker k's updates raise element k by one each: what is read tells how many of whose are in it."""

    def gradient(self, rank, step, x):
        g = torch.zeros_like(x)
        g[rank] = -1.0
        return g


class Clocks(Instrument):
    """How many batches each worker has done, and the widest gap there ever was between two."""

    def __init__(self, workers):
        self.done = [0] * workers
        self.widest = 0

    def send(self, node, dst, m):
        if not node.is_server:
            self.done[node.rank] = node.progress.clock
            self.widest = max(self.widest, max(self.done) - min(self.done))


class Shown(Instrument):
    """Each model that a worker was shown, with the worker's rank and clock at that moment."""

    def __init__(self):
        self.models = []

    def receive(self, node, m):
        if m.tag == "reply" and not node.is_server:
            self.models.append((node.rank, node.progress.clock, m.body.tolist()))


def away(workers, latency, far):
    """A network on which the first worker is farther from the server than the others."""
    link = Link(latency=latency + far)
    return Network(latency=latency, links={(0, workers): link, (workers, 0): link})


def test_one_step_ahead_by_hand():
    # Gradients take 1 and 2.25 s, messages no time; the minima are 0 and 4.
    #   0.00 s  both read 8
    a = 8 - 0.25 * (8 - 0)
    #   1.00 s  worker 0 is 1 ahead, which it may be, and reads a
    #   2.00 s  worker 0 is 2 ahead: its update is not shown yet, and it has to wait
    b = a - 0.25 * (a - 0) - 0.25 * (8 - 4)
    #   2.25 s  worker 1's first update comes: both read b
    #   3.25 s  worker 0 is 2 ahead again, and waits
    c = b - 0.25 * (b - 0) - 0.25 * (b - 4)
    #   4.50 s  worker 1's second: both read c
    #   5.50 s  worker 0 has done its last, which is 2 ahead
    d = c - 0.25 * (c - 0) - 0.25 * (c - 4)
    #   6.75 s  worker 1's third, and it reads d
    e = d - 0.25 * (d - 4)
    #   9.00 s  worker 1's last
    reads = Reads()
    run = simulate(
        SSP(bound=1),
        Quadratic(lr=0.25, targets=(0.0, 4.0)),
        workers=2,
        steps=4,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 2.25}),
        observers=[reads],
    )
    assert reads.x == {0: [8.0, a, b, c, e], 1: [8.0, b, c, d, e]}  # the last one is the trained model
    assert reads.at == {0: [0.0, 1.0, 2.25, 4.5, 9.0], 1: [0.0, 2.25, 4.5, 6.75, 9.0]}
    assert (a, b, c, d, e) == (6.0, 3.5, 2.75, 2.375, 2.78125)
    assert run.server.x.item() == e
    assert run.server.merged == 8


def test_without_slack_the_updates_of_one_clock_add_up_by_hand():
    x1 = 8 - 0.25 * ((8 - 0) + (8 - 4) + (8 + 8))
    x2 = x1 - 0.25 * ((x1 - 0) + (x1 - 4) + (x1 + 8))
    x3 = x2 - 0.25 * ((x2 - 0) + (x2 - 4) + (x2 + 8))
    reads = Reads()
    problem = Quadratic(lr=0.25, targets=(0.0, 4.0, -8.0))
    run = simulate(SSP(bound=0), problem, workers=3, steps=3, start=[8.0], compute=PACES, observers=[reads])
    assert reads.x == {rank: [8.0, x1, x2, x3] for rank in range(3)}
    assert reads.at == {rank: [0.0, 2.125, 4.25, 6.375] for rank in range(3)}  # as fast as the slowest
    assert run.server.x.item() == x3


def test_without_slack_an_update_is_hidden_from_who_reads_late_by_hand():
    # Worker 0 is at hand, worker 1's messages take 2 s; a gradient takes 1/4 s. Worker 1's first update comes
    # at 6.25 s, worker 0's second at 6.5 s, long before worker 1 asks again, at 10.25 s.
    x1 = 8 - 0.25 * ((8 - 0) + (8 - 4))
    x2 = x1 - 0.25 * ((x1 - 0) + (x1 - 4))
    x3 = x2 - 0.25 * ((x2 - 0) + (x2 - 4))
    reads, far = Reads(), Link(latency=2.0)
    simulate(
        SSP(bound=0),
        Quadratic(lr=0.25, targets=(0.0, 4.0)),
        workers=2,
        steps=3,
        start=[8.0],
        compute=Compute(mean=0.25),
        network=Network(links={(1, 2): far, (2, 1): far}),
        observers=[reads],
    )
    assert reads.x == {0: [8.0, x1, x2, x3], 1: [8.0, x1, x2, x3]}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_without_slack_it_is_bulk_synchronous_exactly(workers, seed):
    # the sum of N updates is N times their mean
    def problem(lr):
        return Quadratic(lr=lr, curvature=0.5, targets=(0.0, 4.0, -8.0, 12.0))

    options = {"workers": workers, "steps": 6, "start": [8.0, -2.0], "seed": seed}
    loose = {"compute": Compute(mean=1.0, jitter=0.5), "network": Network(latency=0.1)}
    run = simulate(SSP(bound=0), problem(0.25), **loose, **options)
    assert torch.equal(run.server.x, simulate(Sync(), problem(0.25 * workers), **options).worker(0).x)


def test_updates_add_up_whatever_samples_are_behind_them():
    problem = Slope(lr=0.5, gradients=(1.0, 10.0), counts=(1, 3))
    run = simulate(SSP(bound=0), problem, workers=2, steps=2)
    assert run.server.x.item() == -0.5 * 2 * (1 + 10)
    assert run.server.merged == 2 * (1 + 3)


@pytest.mark.parametrize("bound", [None, 7, 100])
def test_with_no_bound_or_one_that_nobody_meets_it_is_asynchronous_sgd_bit_for_bit(bound):
    options = {
        "workers": 4,
        "steps": 7,
        "start": [0.9, -0.4],
        "compute": Compute(mean=1.0, jitter=0.5, slow={2: 3.0}),
        "network": Network(latency=0.1, bandwidth=1e4),
    }
    here = simulate(SSP(bound=bound), Drawn(lr=0.1), **options)
    assert here.digest() == simulate(ASGD(), Drawn(lr=0.1), **options).digest()


def test_one_worker_is_never_held_up():
    run = simulate(SSP(bound=0), Slope(lr=0.5), steps=4, compute=Compute(mean=1.0))
    assert (run.server.x.item(), run.seconds) == (-2.0, 4.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bound=st.integers(0, 4),
    seed=st.integers(0, 1000),
    slow=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4),
    latency=st.sampled_from([0.0, 0.1, 1.0]),
    far=st.sampled_from([0.0, 3.0]),
)
def test_nobody_is_ever_more_than_one_step_beyond_the_bound(bound, seed, slow, latency, far):
    workers = len(slow)
    clocks = Clocks(workers)
    run = simulate(
        SSP(bound=bound),
        Slope(),
        workers=workers,
        steps=6,
        compute=Compute(mean=1.0, jitter=0.4, slow=dict(enumerate(slow))),
        network=away(workers, latency, far),
        seed=seed,
        observers=[clocks],
    )
    assert clocks.widest <= bound + 1
    assert clocks.done == [6] * workers
    assert run.server.x.item() == -6 * workers


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_fast_worker_goes_as_far_as_the_bound_lets_it(bound):
    clocks = Clocks(2)
    compute = Compute(mean=1.0, slow={1: 10.0})
    simulate(SSP(bound=bound), Slope(), workers=2, steps=6, compute=compute, observers=[clocks])
    assert clocks.widest == bound + 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bound=st.integers(0, 3),
    seed=st.integers(0, 1000),
    slow=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4),
    latency=st.sampled_from([0.0, 0.1, 1.0]),
    far=st.sampled_from([0.0, 3.0]),
)
def test_a_reader_sees_all_that_is_older_than_the_bound_and_all_of_its_own(bound, seed, slow, latency, far):
    # who has done c batches sees at least the first c - bound of everybody: those of clock c - bound - 1 and
    # before, where the first clock is 0
    workers = len(slow)
    shown = Shown()
    simulate(
        SSP(bound=bound),
        Own(),
        workers=workers,
        steps=5,
        start=[0.0] * workers,
        compute=Compute(mean=1.0, jitter=0.4, slow=dict(enumerate(slow))),
        network=away(workers, latency, far),
        seed=seed,
        observers=[shown],
    )
    assert len(shown.models) == workers * (5 + 1)
    for reader, clock, updates in shown.models:
        assert updates[reader] == clock
        assert all(seen >= clock - bound for seen in updates)


def test_a_reader_may_see_more_than_it_must():
    # with a bound of 3, worker 1's first update is there at once and not only when it has to be
    shown = Shown()
    compute = Compute(mean=1.0, slow={0: 1.5})
    simulate(SSP(bound=3), Own(), workers=2, steps=3, start=[0.0, 0.0], compute=compute, observers=[shown])
    assert (0, 1, [1.0, 1.0]) in shown.models


@pytest.mark.parametrize("bound", [0, 1, 3, None])
@pytest.mark.parametrize("step", [0, 2])
def test_every_batch_is_in_the_model_once_though_a_worker_dies(bound, step):
    run = simulate(
        SSP(bound=bound),
        Census(steps=5),
        workers=3,
        steps=5,
        start=[0.0] * 15,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=1, step=step),
    )
    assert run.server.x.tolist() == [1.0] * 15


def test_the_dead_hold_up_nobody_once_they_are_missed_by_hand():
    # Gradients take 1 and 1.25 s. Worker 1 dies at 1.25 s in its second step and is missed at 3.25 s.
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4))
    x2 = x1 - 0.5 * (x1 - 0)  # 2.25 s  worker 0; it is shown at 3.25 s
    x3 = x2 - 0.5 * (x2 - 0)  # 4.25 s  worker 0, its last
    x4 = x3 - 0.5 * (x3 - 4)  # 5.25 s  worker 0 does what worker 1 has left
    x5 = x4 - 0.5 * (x4 - 4)  # 6.25 s  and this
    reads, trail = Reads(), Trail()
    run = simulate(
        SSP(bound=0),
        Quadratic(lr=0.5, targets=(0.0, 4.0)),
        workers=2,
        steps=3,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults(noticed_after=2.0).crash(rank=1, step=1),
        observers=[reads, trail],
    )
    assert reads.x[0] == [8.0, x1, x2, x3, x4, x5] == [8.0, 2.0, 1.0, 0.5, 2.25, 3.125]
    assert reads.at[0] == [0.0, 1.25, 3.25, 4.25, 5.25, 6.25]
    assert trail.x[-1] == run.server.x.item() == x5


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="bound=-1 must be at least 0"):
        SSP(bound=-1)


@pytest.mark.parametrize("overflowing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("bound", [0, 1, None])
def test_steps_without_a_sample_move_clocks_alone(overflowing, bound):
    """The sums are of four gradients of each, but for those that overflowed; shown or hidden."""
    clocks = Clocks(2)
    run = simulate(
        SSP(bound=bound),
        Overflowing(gradients=((3.0, 1.0), (2.0, -5.0)), overflowing=overflowing),
        workers=2,
        steps=4,
        start=[0.0, 0.0],
        compute=Compute(mean=1.0, slow={1: 2.25}),
        observers=[clocks],
    )
    zero, one = 4 - (0 in overflowing), 4 - (1 in overflowing)
    assert run.server.x.tolist() == [-3.0 * zero - 2.0 * one, -1.0 * zero + 5.0 * one]
    assert run.server.merged == zero + one
    assert run.server.variables.state()["clocks"].tolist() == [4, 4]
    assert clocks.widest <= (inf if bound is None else bound + 1)
