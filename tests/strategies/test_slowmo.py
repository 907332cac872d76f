"""SlowMo, slow momentum: worked out on paper, and its identities."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from blockwise import Bowls, path
from ending import simulate_loops

from shoal.strategies import BMUF, Local, SlowMo
from shoal.testing.problems import Quadratic, Slope, VectorReplica, simulate

# Two workers that go down a slope of 1 and of 3, two steps of rate 1/2: a block moves the average by -2.
SLOPES = Slope(lr=0.5, gradients=(1.0, 3.0))


@dataclass(frozen=True)
class Scheduled(Slope):
    """A slope whose step number s has the learning rate `rates[s]`."""

    rates: Sequence[float] = (1.0,)

    def replica(self, rank, start):
        return ScheduledReplica(self, rank, start.clone())


class ScheduledReplica(VectorReplica):
    async def gradient(self):
        self.lr = self._problem.rates[self._step]
        return await super().gradient()


def paper(displacement, rates, *, beta, a, start):
    """The paper's recursion, in its own symbols; `displacement(x0, t)` is x0 - x after block t."""
    u, x0, out = 0.0, start, []
    for t, lr in enumerate(rates):
        u = beta * u + displacement(x0, t) / lr
        x0 = x0 - a * lr * u
        out.append(x0)
    return out


def test_slow_momentum_by_hand():
    u1 = 2 / 0.5
    x1 = 0 - 0.5 * u1
    u2 = 0.5 * u1 + 2 / 0.5
    x2 = x1 - 0.5 * u2
    u3 = 0.5 * u2 + 2 / 0.5
    x3 = x2 - 0.5 * u3
    assert path(SlowMo(period=2), SLOPES, 3) == [x1, x2, x3] == [-2.0, -5.0, -8.5]


@pytest.mark.parametrize(("beta", "a"), [(0.5, 1.0), (0.5, 0.5), (0.25, 2.0), (0.0, 1.0)])
def test_the_paper_s_recursion_on_a_quadratic(beta, a):
    # two steps of x -= (x - target) / 2 keep a quarter of the distance; the mean target is 1
    expected = paper(lambda x0, t: (x0 - 1) * 3 / 4, [0.5] * 5, beta=beta, a=a, start=5.0)
    problem = Quadratic(lr=0.5, targets=(0.0, 2.0))
    assert path(SlowMo(period=2, momentum=beta, rate=a), problem, 5, start=5.0) == expected


def test_a_rate_that_falls_shortens_what_momentum_carries_on_by_hand():
    rates = (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)
    u1 = 2 / 0.5
    x1 = 0 - 0.5 * u1
    u2 = 0.5 * u1 + 1 / 0.25  # a step is half as long now
    x2 = x1 - 0.25 * u2
    u3 = 0.5 * u2 + 1 / 0.25
    x3 = x2 - 0.25 * u3
    problem = Scheduled(gradients=(1.0, 3.0), rates=rates)
    assert path(SlowMo(period=2), problem, 3) == [x1, x2, x3] == [-2.0, -3.5, -5.25]
    classical = BMUF(period=2, momentum=0.5, nesterov=False, warmup=0)
    assert path(classical, problem, 3) == [-2.0, -2.0 - (1 + 1), -4.0 - (1 + 1)]  # half of each whole step


def test_a_rate_that_changes_within_a_block_counts_as_it_is_at_its_end():
    rates = (0.5, 0.25, 0.25, 0.125)
    d1, d2 = 2 * (0.5 + 0.25), 2 * (0.25 + 0.125)
    expected = paper(lambda x0, t: (d1, d2)[t], (0.25, 0.125), beta=0.5, a=1.0, start=0.0)
    assert path(SlowMo(period=2), Scheduled(gradients=(1.0, 3.0), rates=rates), 2) == expected


def test_a_rate_of_zero_stops_the_model_and_what_momentum_it_had():
    rates = (0.5, 0.5, 0.0, 0.0, 0.5, 0.5)
    assert path(SlowMo(period=2), Scheduled(gradients=(1.0, 3.0), rates=rates), 3) == [-2.0, -2.0, -4.0]


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize(("beta", "a"), [(0.5, 1.0), (0.9, 0.7), (0.3, 1.3)])
def test_at_a_fixed_rate_it_is_classical_block_momentum_bit_for_bit(beta, a, reset):
    problem = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))  # no short binary form: bits, not numbers
    bmuf = BMUF(period=2, momentum=beta, rate=a, nesterov=False, warmup=0, reset_momentum=reset)
    slowmo = SlowMo(period=2, momentum=beta, rate=a, reset_momentum=reset)
    assert path(slowmo, problem, 5, start=0.7) == path(bmuf, problem, 5, start=0.7)


def test_without_momentum_it_is_model_averaging_bit_for_bit():
    problem = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))
    assert path(SlowMo(2, momentum=0.0), problem, 5, start=0.7) == path(Local(2), problem, 5, start=0.7)


def test_a_last_short_block_is_merged_too():
    run = simulate(SlowMo(period=2), SLOPES, workers=2, steps=3)
    assert [node.x.item() for node in run.nodes] == [-2 - (0.5 * 2 + 1)] * 2
    assert run.worker(0).merged == 6


def test_loops_of_different_lengths_end_with_the_same_model():
    # two blocks of both, a third with one step of worker 0 and two of worker 1, a fourth of worker 1 alone
    d = (2, 2, (1 * 0.5 + 2 * 3) / 3, 3)
    v, x = 0.0, 0.0
    for displacement in d:
        v = 0.5 * v + displacement
        x -= v
    run = simulate_loops(SlowMo(period=2), SLOPES, (5, 8))
    assert [node.x.item() for node in run.nodes] == [pytest.approx(x, abs=1e-12)] * 2
    assert run.worker(0).x.item() == run.worker(1).x.item()


def test_local_momentum_is_forgotten_at_every_block_unless_kept():
    block, longer = 1 + 1.5, 1.75 + 1.875
    assert path(SlowMo(2, 0.5), Slope(momentum=0.5), 2) == [-block, -block - 1.5 * block]
    kept = SlowMo(2, 0.5, reset_momentum=False)
    assert path(kept, Slope(momentum=0.5), 2) == [-block, -block - 0.5 * block - longer]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"rate": 0.0}, "rate"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        SlowMo(**options)
