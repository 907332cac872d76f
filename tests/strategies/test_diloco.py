"""DiLoCo: worked out on paper, and its identities."""

import pytest
import torch
from blockwise import Bowls, path

from shoal.strategies import BMUF, DiLoCo, Local, Sync
from shoal.testing.problems import Quadratic, Slope, simulate

# Two workers that go down a slope of 1 and of 3, two steps of rate 1/2: the mean displacement is +2.
SLOPES = Slope(lr=0.5, gradients=(1.0, 3.0))
D = 0.5 * 2 * (1 + 3) / 2


def test_the_outer_step_by_hand():
    buf1 = D
    theta1 = 0 - 0.5 * (D + 0.5 * buf1)
    buf2 = 0.5 * buf1 + D
    theta2 = theta1 - 0.5 * (D + 0.5 * buf2)
    buf3 = 0.5 * buf2 + D
    theta3 = theta2 - 0.5 * (D + 0.5 * buf3)
    got = path(DiLoCo(period=2, rate=0.5, momentum=0.5), SLOPES, 3)
    assert got == [theta1, theta2, theta3] == [-1.5, -3.25, -5.125]


def test_the_outer_step_by_hand_where_the_displacement_shrinks():
    # two steps of x -= (x - a) / 2 leave a quarter of the distance to a, so d = 3/4 (theta - 1)
    theta, buf, expected = 5.0, 0.0, []
    for _ in range(5):
        d = 0.75 * (theta - 1)
        buf = 0.5 * buf + d
        theta = theta - 0.5 * (d + 0.5 * buf)
        expected.append(theta)
    problem = Quadratic(lr=0.5, targets=(0.0, 2.0))
    assert path(DiLoCo(period=2, rate=0.5, momentum=0.5), problem, 5, start=5.0) == expected


def test_displacements_are_weighted_by_the_samples_behind_them():
    d = (1 * 1 + 3 * 3) / (1 + 3)
    problem = Slope(lr=0.5, gradients=(1.0, 3.0), counts=(1, 3))
    assert path(DiLoCo(period=2, rate=0.5, momentum=0.5), problem, 1) == [-0.5 * (d + 0.5 * d)]


@pytest.mark.slow  # torch imports its compiler with the first optimizer
@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.5, 0.5), (1.0, 0.25)])
def test_the_outer_step_is_torch_sgd_with_nesterov_momentum(rate, momentum):
    theta, expected = torch.tensor([8.0], dtype=torch.float64), []
    outer = torch.optim.SGD([theta], lr=rate, momentum=momentum, nesterov=True)
    for _ in range(12):
        ends = []
        for curvature, target in ((1.0, 0.0), (0.5, 4.0)):
            x = theta.item()
            for _ in range(2):
                x -= 0.25 * curvature * (x - target)
            ends.append(x)
        theta.grad = theta - sum(ends) / 2
        outer.step()
        expected.append(theta.item())
    got = path(DiLoCo(2, rate, momentum), Bowls(lr=0.25), 12, start=8.0)
    assert got == pytest.approx(expected, abs=1e-12)  # a mean of differences rounds unlike one of models


def test_its_defaults_are_the_paper_s():
    assert (DiLoCo().period, DiLoCo().rate, DiLoCo().momentum, DiLoCo().warmup) == (500, 0.7, 0.9, 0)


@pytest.mark.parametrize("local_momentum", [0.0, 0.5])
def test_with_rate_one_and_no_momentum_it_is_model_averaging(local_momentum):
    # the inner optimizer is kept across rounds, so model averaging keeps its velocity too
    problem, local = Bowls(lr=0.5, momentum=local_momentum), Local(period=2, reset_momentum=False)
    assert path(DiLoCo(2, rate=1.0, momentum=0.0), problem, 4, start=8.0) == path(
        local, problem, 4, start=8.0
    )


def test_with_one_inner_step_rate_one_and_no_momentum_it_is_synchronous_sgd():
    problem = Bowls(lr=0.5)
    diloco = path(DiLoCo(1, rate=1.0, momentum=0.0), problem, 6, start=8.0, period=1)
    assert diloco == path_of_sync(problem, 6, 8.0)


def path_of_sync(problem, steps, start):
    runs = [simulate(Sync(), problem, workers=2, steps=k, start=[start]) for k in range(1, steps + 1)]
    return [run.worker(0).x.item() for run in runs]


def test_it_is_block_momentum_with_nesterov():
    problem = Bowls(lr=0.25, momentum=0.5)
    bmuf = BMUF(period=2, momentum=0.9, rate=0.7, warmup=0, reset_momentum=False)
    expected = path(bmuf, problem, 12, start=8.0)
    got = path(DiLoCo(period=2, rate=0.7, momentum=0.9), problem, 12, start=8.0)
    assert got == pytest.approx(expected, abs=1e-12)  # the sums are formed in another order


def test_it_is_block_momentum_with_nesterov_bit_for_bit_where_nothing_rounds():
    bmuf = BMUF(period=2, momentum=0.5, rate=0.5, warmup=0)
    diloco = DiLoCo(period=2, rate=0.5, momentum=0.5)
    assert path(diloco, Bowls(lr=0.5), 5, start=8.0) == path(bmuf, Bowls(lr=0.5), 5, start=8.0)


def test_the_inner_optimizer_is_kept_across_rounds():
    d1, d2 = 1 + 1.5, 1.75 + 1.875  # velocities 1, 3/2, then 7/4, 15/8
    got = path(DiLoCo(2, rate=0.5, momentum=0.0), Slope(momentum=0.5), 2)
    assert got == [-0.5 * d1, -0.5 * d1 - 0.5 * d2]


def test_warm_up_steps_are_averaged_one_by_one_and_leave_no_velocity():
    diloco = DiLoCo(period=2, rate=0.5, momentum=0.5, warmup=2)
    after = [simulate(diloco, SLOPES, workers=2, steps=k).worker(0).x.item() for k in (1, 2, 4)]
    assert after == [-1.0, -2.0, -2 - 0.5 * (D + 0.5 * D)]


def test_a_last_short_round_is_merged_too():
    run = simulate(DiLoCo(2, rate=0.5, momentum=0.5), SLOPES, workers=2, steps=3)
    buf2 = 0.5 * D + D / 2
    expected = -0.5 * (D + 0.5 * D) - 0.5 * (D / 2 + 0.5 * buf2)
    assert [run.worker(k).x.item() for k in (0, 1)] == [expected] * 2


def test_one_worker_is_the_outer_optimizer_alone():
    # Lookahead with momentum: the same arithmetic, nobody to talk to
    problem = Quadratic(lr=0.5, targets=(1.0,))
    run = simulate(DiLoCo(2, rate=0.5, momentum=0.5), problem, steps=2, start=[5.0])
    assert run.worker(0).x.item() == 5 - 0.5 * (3 + 0.5 * 3)
    assert run.worker(0).meter.messages_sent == 0


@pytest.mark.slow  # torch imports its compiler with the first optimizer
def test_one_worker_is_snoo_torch_s_sgd_fed_with_the_displacement_of_torch_s_adam():
    slow = torch.tensor([8.0, -3.0], dtype=torch.float64)
    fast = slow.clone()
    inner = torch.optim.Adam([fast], lr=0.25)
    outer = torch.optim.SGD([slow], lr=0.7, momentum=0.6, nesterov=True)
    for step in range(1, 16):
        fast.grad = fast - 1.0
        inner.step()
        if step % 3 == 0:
            slow.grad = slow - fast
            outer.step()
            fast.copy_(slow)  # Adam's state is kept
    run = simulate(DiLoCo(3, 0.7, 0.6), ByAdam(lr=0.25, targets=(1.0,)), steps=15, start=[8.0, -3.0])
    torch.testing.assert_close(run.worker(0).x, slow, rtol=0, atol=1e-12)
    assert run.worker(0).meter.messages_sent == 0


class ByAdam(Quadratic):
    """A bowl that torch's Adam descends."""

    def replica(self, rank, start):
        replica = super().replica(rank, start)
        adam = torch.optim.Adam([replica.x], lr=self.lr)

        def descend(g):
            replica.x.grad = g
            adam.step()

        replica.descend = descend
        return replica


def test_one_worker_without_momentum_is_lookahead():
    # two steps of x -= (x - 1) / 2 leave a quarter of the distance; half-way there from 5: 5 - (5 - 2) / 2
    problem = Quadratic(lr=0.5, targets=(1.0,))
    assert path(DiLoCo(2, rate=0.5, momentum=0.0), problem, 2, workers=1, start=5.0) == [3.5, 2.5625]


def test_one_worker_on_a_slope_goes_rate_over_one_less_momentum_times_as_far():
    runs = [simulate(DiLoCo(1, 0.7, 0.6), Slope(), steps=k).worker(0).x.item() for k in (60, 80)]
    assert (runs[0] - runs[1]) / 20 == pytest.approx(0.7 / (1 - 0.6))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"rate": 0.0}, "rate"),
        ({"rate": -0.7}, "rate"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DiLoCo(**options)
