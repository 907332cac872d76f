"""Asynchronous DiLoCo: worked out on paper, and its identities."""

from collections import Counter

import pytest
import torch
from blockwise import Bowls, path
from central import Trail

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Network
from shoal.strategies import AsyncDiLoCo, DiLoCo
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.strategy import Setting

HALVES = {"period": 1, "rate": 0.5, "momentum": 0.5, "dynamic": False}
SLOPES = Slope(gradients=(1.0, 3.0))


def trail(strategy, problem, workers=2, steps=2, start=0.0, **options):
    """The server's model after each of its updates."""
    seen = Trail()
    simulate(strategy, problem, workers=workers, steps=steps, start=[start], observers=[seen], **options)
    return seen.x


# Worker 0 pushes 1 after 1 s and 2 s, worker 1 pushes 3 after 1.5 s and 3 s. With N = 2:
#   1        theta = 0 - 1/2 (1/2) = -0.25
#   3        m = 1/2 0 + (1 + 3)/2 = 2,   theta = -0.25 - 1/2 (1/2 2 + 3/2) = -1.5
#   1        theta = -1.5 - 1/2 (1/2) = -1.75
#   3        m = 1/2 2 + 2 = 3,           theta = -1.75 - 1/2 (1/2 3 + 3/2) = -3.25
UNEVEN = {"compute": Compute(1.0, slow={1: 1.5})}


def test_four_arrivals_by_hand():
    assert trail(AsyncDiLoCo(**HALVES), SLOPES, **UNEVEN) == [-0.25, -1.5, -1.75, -3.25]


def test_four_arrivals_by_hand_with_the_momentum_spread_over_them():
    # c = 1/2: half of the momentum in each arrival, -1/2 (1/2 1/2 m) more
    #   -0.25;  m = 2: -0.25 - 1/2 (1/2 + 3/2) = -1.25;  -1.25 - 1/2 (1/2 + 1/2) = -1.75
    #   m = 3: -1.75 - 1/2 (3/4 + 3/2) = -2.875
    spread = AsyncDiLoCo(**HALVES, activation=0.5)
    assert trail(spread, SLOPES, **UNEVEN) == [-0.25, -1.25, -1.75, -2.875]


def test_with_a_buffer_of_one_it_is_torch_s_nesterov_at_every_arrival():
    theta, buf, expected = 5.0, 0.0, []
    for _ in range(6):
        d = 0.75 * (theta - 1)  # of two steps of x -= (x - 1) / 2
        buf = 0.5 * buf + d
        theta -= 0.25 * (d + 0.5 * buf)
        expected.append(theta)
    strategy = AsyncDiLoCo(period=2, rate=0.25, momentum=0.5, buffer=1, activation=0.7)
    got = trail(strategy, Quadratic(lr=0.5, targets=(1.0,)), workers=1, steps=12, start=5.0)
    assert got == pytest.approx(expected, abs=1e-12)


def test_without_momentum_every_arrival_counts_one_nth():
    strategy = AsyncDiLoCo(period=2, rate=0.5, momentum=0.0, dynamic=False)
    assert trail(strategy, SLOPES, steps=2, **UNEVEN) == [-0.5, -0.5 - 1.5]


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_with_equal_speeds_and_a_grace_period_for_all_it_is_diloco(latency):
    problem, workers = Bowls(lr=0.25), 2
    strategy = AsyncDiLoCo(period=2, rate=0.7, momentum=0.9, grace=0.5)
    seen = trail(
        strategy, problem, workers, steps=10, start=8.0, compute=Compute(1.0), network=Network(latency)
    )
    expected = path(DiLoCo(2, 0.7, 0.9), problem, 5, start=8.0)
    assert seen[workers - 1 :: workers] == pytest.approx(expected, abs=1e-12)


def test_without_a_grace_period_it_is_not():
    seen = trail(AsyncDiLoCo(2, 0.7, 0.9), Bowls(lr=0.25), steps=10, start=8.0, **UNEVEN)
    assert seen[1::2] != pytest.approx(path(DiLoCo(2, 0.7, 0.9), Bowls(lr=0.25), 5, start=8.0), abs=1e-3)


class Starts(Instrument):
    """When each worker takes its steps."""

    def __init__(self):
        self.at = {}

    def step(self, node):
        self.at.setdefault(node.rank, []).append(node.transport.now())


def test_those_who_end_within_the_grace_period_of_the_first_go_on_together():
    # worker 0 is done at 1.0, worker 1 at 1.25, worker 2 at 2.0: the first two go on at 1.5, the third at 2.5
    starts, compute = Starts(), Compute(1.0, slow={1: 1.25, 2: 2.0})
    strategy = AsyncDiLoCo(period=1, dynamic=False, grace=0.5)
    simulate(strategy, Slope(), workers=3, steps=2, compute=compute, observers=[starts])
    assert starts.at == {0: [1.5, 2.5], 1: [1.5, 2.75], 2: [2.5, 4.5]}


def test_a_slower_worker_takes_as_many_fewer_steps_in_a_round():
    # worker 1 needs twice as long: after its first round of 4 steps it takes 2 in each
    class Pushes(Instrument):
        def __init__(self):
            self.by = Counter()

        def send(self, node, dst, m):
            self.by[node.rank] += m.tag == "push"

    pushes = Pushes()
    options = {"workers": 2, "steps": 12, "compute": Compute(1.0, slow={1: 2.0}), "observers": [pushes]}
    simulate(AsyncDiLoCo(period=4), Slope(), **options)
    assert (pushes.by[0], pushes.by[1]) == (3, 1 + 4)


def test_workers_of_one_speed_take_equally_many_steps():
    run = simulate(AsyncDiLoCo(period=4), Slope(), workers=3, steps=12, compute=Compute(0.1))
    assert run.server.progress.version == 3 * 3


def test_every_sample_is_in_the_model_also_of_a_last_short_round():
    run = simulate(AsyncDiLoCo(period=4), Slope(counts=(1, 3)), workers=2, steps=10, compute=Compute(1.0))
    assert run.server.merged == 10 * 4
    assert all(torch.equal(run.worker(k).x, run.server.x) for k in range(2))


def test_a_slice_each_at_two_servers_is_the_same():
    one, two = (
        simulate(
            AsyncDiLoCo(period=2),
            Bowls(lr=0.3),
            workers=2,
            steps=8,
            start=[8.0, 1.0],
            shards=shards,
            **UNEVEN,
        )
        for shards in (1, 2)
    )
    assert torch.equal(one.solution, two.solution)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"buffer": 0}, "buffer=0"),
        ({"momentum": 1.0}, "momentum"),
        ({"rate": 0.0}, "rate"),
        ({"grace": -1.0}, "grace"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        AsyncDiLoCo(**options)


def test_more_than_all_of_the_momentum_is_refused():
    AsyncDiLoCo(activation=0.25).check(Setting(workers=4))
    with pytest.raises(ValueError, match="1/4 is the most"):
        AsyncDiLoCo(activation=0.3).check(Setting(workers=4))
