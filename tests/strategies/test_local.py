"""Model averaging, local SGD: worked out on paper, and its identities."""

from dataclasses import dataclass

import pytest
import torch
from blockwise import Bowls

from shoal.strategies import Local, Single, Sync
from shoal.testing.problems import Problem, Quadratic, Slope, simulate


@dataclass(frozen=True)
class Pulse(Problem):
    """Worker 0 sees a gradient of 1 in one single step; all else is flat."""

    at: int = 0

    def gradient(self, rank, step, x):
        return torch.full_like(x, float(rank == 0 and step == self.at))


def final(strategy, problem, workers=2, steps=4, start=0.0):
    run = simulate(strategy, problem, workers=workers, steps=steps, start=[start])
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(workers))
    return run.worker(0).x.item()


def test_after_every_period_all_models_become_their_average():
    # worker k after two steps of x -= (x - a) / 2 stands at a + (x - a) / 4
    problem = Bowls(lr=0.5, curvatures=(1.0, 1.0))
    x2 = ((0 + (8 - 0) / 4) + (4 + (8 - 4) / 4)) / 2
    x4 = ((0 + (x2 - 0) / 4) + (4 + (x2 - 4) / 4)) / 2
    x6 = ((0 + (x4 - 0) / 4) + (4 + (x4 - 4) / 4)) / 2
    assert [final(Local(period=2), problem, steps=k, start=8.0) for k in (2, 4, 6)] == [x2, x4, x6]


def test_different_curvatures_by_hand():
    # worker 0 halves its distance to 0 at each step; worker 1 keeps 3/4 of its distance to 4
    x2 = (8 / 4 + 4 + (8 - 4) * 9 / 16) / 2
    x4 = (x2 / 4 + 4 + (x2 - 4) * 9 / 16) / 2
    assert [final(Local(period=2), Bowls(lr=0.5), steps=k, start=8.0) for k in (2, 4)] == [x2, x4]


def test_between_two_averages_nobody_talks():
    run = simulate(Local(period=4), Slope(), workers=2, steps=8)
    assert [run.worker(k).meter.messages_sent for k in (0, 1)] == [
        2 * 2,
        2 * 2,
    ]  # a stripe and an average a block


def test_models_are_weighted_by_the_samples_behind_them():
    problem = Slope(lr=0.5, gradients=(1.0, 3.0), counts=(1, 3))
    block = (1 * (-0.5 * 2 * 1) + 3 * (-0.5 * 2 * 3)) / (1 + 3)
    assert [final(Local(period=2), problem, steps=k) for k in (2, 4)] == [block, 2 * block] == [-2.5, -5.0]


def test_local_momentum_is_forgotten_at_every_average():
    # velocities of a block: 1, 1 + 1/2
    block = -(1 + 1.5)
    assert final(Local(period=2), Slope(momentum=0.5), steps=6) == 3 * block


def test_local_momentum_can_be_kept():
    # velocities: 1, 3/2, 7/4, 15/8
    assert final(Local(period=2, reset_momentum=False), Slope(momentum=0.5), steps=4) == -(
        1 + 1.5 + 1.75 + 1.875
    )


def test_warm_up_steps_are_averaged_one_by_one():
    # steps 0 to 2 alone, then blocks 3-4 and 5-6; a step from x leads to the average of x / 2 and 3 x / 4 + 1
    problem, x = Bowls(lr=0.5), 8.0
    expected = []
    for length in (1, 1, 1, 2, 2):
        x = (x * 0.5**length + 4 + (x - 4) * 0.75**length) / 2
        expected.append(x)
    local = Local(period=2, warmup=3)
    assert [final(local, problem, steps=k, start=8.0) for k in (1, 2, 3, 5, 7)] == expected
    assert simulate(local, problem, workers=2, steps=7).worker(0).meter.messages_sent == 5 * 2


def test_a_last_short_block_is_merged_too():
    x3 = (8 / 8 + 4 + (8 - 4) * 27 / 64) / 2
    x4 = (x3 / 2 + 4 + (x3 - 4) * 3 / 4) / 2
    run = simulate(Local(period=3), Bowls(lr=0.5), workers=2, steps=4, start=[8.0])
    assert [run.worker(k).x.item() for k in (0, 1)] == [x4, x4]
    assert run.worker(0).merged == 8


@pytest.mark.parametrize("i", [1, 2, 3, 4])
def test_a_minibatch_contributes_the_share_that_the_paper_gives(i):
    # (1/N) lr (1 - mu^(tau - i + 1)) / (1 - mu)
    share = (1 / 2) * 0.25 * (1 - 0.5 ** (4 - i + 1)) / (1 - 0.5)
    assert final(Local(period=4), Pulse(lr=0.25, momentum=0.5, at=i - 1), steps=8) == -share


def test_averaging_every_step_is_synchronous_sgd():
    for steps in range(1, 9):
        local = final(Local(period=1), Bowls(lr=0.5), steps=steps, start=8.0)
        assert local == final(Sync(), Bowls(lr=0.5), steps=steps, start=8.0)


def test_averaging_every_step_with_private_momentum_is_synchronous_momentum_sgd():
    problem = Bowls(lr=0.5, momentum=0.5)
    kept, reset = Local(period=1, reset_momentum=False), Local(period=1)
    for steps in range(1, 9):
        assert final(kept, problem, steps=steps, start=8.0) == final(Sync(), problem, steps=steps, start=8.0)
    assert final(reset, problem, steps=3, start=8.0) != final(Sync(), problem, steps=3, start=8.0)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("period", [1, 2, 3, 5, 12])
def test_with_one_hessian_for_all_the_mean_follows_the_synchronous_path_for_any_period(period, momentum):
    problem = Quadratic(lr=0.5, momentum=momentum, targets=(0.0, 4.0, 1.0, 7.0))
    local = Local(period=period, reset_momentum=False)
    assert final(local, problem, 4, 12, 16.0) == final(Sync(), problem, 4, 12, 16.0)


def test_with_different_hessians_it_does_not():
    assert final(Local(period=4), Bowls(lr=0.5), steps=4) != final(Sync(), Bowls(lr=0.5), steps=4)


def test_one_worker_is_single():
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(3.0,))
    alone = final(Single(), problem, 1, 10, 8.0)
    assert final(Local(period=3, reset_momentum=False), problem, 1, 10, 8.0) == alone


def test_a_block_has_at_least_one_step():
    with pytest.raises(ValueError, match="period=0 must be at least 1"):
        Local(period=0)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match="warmup"):
        Local(warmup=-1)
