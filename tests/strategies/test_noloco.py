"""NoLoCo: worked out on paper, and its identities."""

from functools import partial

import pytest
import torch
from blockwise import Bowls, path
from gossiping import FLAT, ends, watch

from shoal.sim import Compute, Faults
from shoal.strategies import BMUF, Gossip, NoLoCo
from shoal.testing.problems import Quadratic, Slope
from shoal.vocabulary.strategy import Setting

HALVES = {"rate": 0.5, "momentum": 0.5, "pull": 0.5}


def test_two_partners_that_stand_apart_by_hand():
    # Flat ground, one step a round, places 0 and 4: the mean model F is 2 for ever, progress D is 0.
    #   v = 1/2 (2 - 0) = 1,              phi = 0 + 1 = 1
    #   v = 1/2 1 + 1/2 (2 - 1) = 1,      phi = 1 + 1 = 2
    #   v = 1/2 1 + 1/2 (2 - 2) = 1/2,    phi = 2 + 1/2 = 2.5       and the other one always opposite
    _, paths = watch(NoLoCo(period=1, **HALVES), [0.0, 4.0], steps=3)
    assert [paths.at(t) for t in range(3)] == [[1.0, 3.0], [2.0, 2.0], [2.5, 1.5]]
    assert paths.of("velocity", 2) == [0.5, -0.5]


def test_two_partners_on_slopes_by_hand():
    # Two steps of 1/2 down slopes of 1 and 3: progress -1 and -3, D = -2; both have the same phi, F = phi.
    #   v = 1/2 (-2) = -1,             phi = -1
    #   v = 1/2 (-1) - 1 = -3/2,       phi = -2.5
    slopes = Slope(lr=0.5, gradients=(1.0, 3.0))
    _, paths = watch(NoLoCo(period=2, **HALVES), [0.0, 0.0], slopes, steps=4)
    assert paths.at(0) == [-0.5, -1.5]
    assert paths.at(1) == [-1.0, -1.0]
    assert paths.at(3) == [-2.5, -2.5]


def test_a_last_short_round_is_in_the_model():
    # as above after four steps; a fifth has progress -1/2 and -3/2, taken alone:
    #   v = 1/2 (-3/2) + 1/2 (-1/2) = -1,  phi = -3.5;      v = -3/4 - 3/4 = -3/2,  phi = -4;    mean -3.75
    slopes = Slope(lr=0.5, gradients=(1.0, 3.0))
    run, _ = watch(NoLoCo(period=2, **HALVES), [0.0, 0.0], slopes, steps=5)
    assert ends(run) == [-3.75, -3.75]


@pytest.mark.parametrize("group", [2, 3])
def test_the_mean_of_all_models_has_heavy_ball_momentum_whoever_meets_whom(group):
    problem = Bowls(lr=0.25, curvatures=(1.0, 0.5, 0.75), targets=(0.0, 4.0, -3.0))
    places = [8.0, 0.0, 4.0, -8.0, 16.0, 1.0]
    strategy = NoLoCo(period=2, rate=0.7, momentum=0.5, group=group)
    _, paths = watch(strategy, places, problem, steps=12)
    slow, velocity = list(places), 0.0
    for t in range(1, 12, 2):
        progress = []
        for k, x in enumerate(slow):
            curvature, target = problem.curvatures[k % 3], problem.targets[k % 3]
            progress.append((1 - 0.25 * curvature) ** 2 * (x - target) + target - x)
        velocity = 0.5 * velocity + 0.7 * sum(progress) / 6
        expected = sum(slow) / 6 + velocity
        slow = paths.at(t)
        assert sum(slow) / 6 == pytest.approx(expected, abs=1e-12)


def test_a_group_of_all_is_block_momentum():
    problem, options = Bowls(lr=0.5), {"rate": 0.5, "momentum": 0.5}
    bmuf = BMUF(period=2, nesterov=False, warmup=0, reset_momentum=False, **options)
    expected = path(bmuf, problem, 5, start=8.0)
    _, paths = watch(NoLoCo(period=2, group=2, **options), [8.0, 8.0], problem, steps=10)
    assert paths.x[0][1::2] == paths.x[1][1::2] == expected


def test_without_gradients_and_momentum_and_with_pull_one_it_is_the_mean_of_pairs():
    _, paths = watch(NoLoCo(period=1, momentum=0.0, pull=1.0), [1.0, 7.0], steps=1)
    gossip, _ = watch(Gossip(help=False), [1.0, 7.0], FLAT, steps=0)
    assert paths.at(0) == [4.0, 4.0] == ends(gossip)


def test_without_pull_models_never_meet_again():
    _, paths = watch(NoLoCo(period=1, pull=0.0), [1.0, 7.0, 2.0, 5.0], Slope(), steps=9)
    apart = [max(paths.at(t)) - min(paths.at(t)) for t in range(9)]
    assert apart == pytest.approx([6.0] * 9)


def test_with_the_default_pull_they_meet():
    _, paths = watch(NoLoCo(period=1), [1.0, 7.0, 2.0, 5.0], Slope(), steps=40)
    assert max(paths.at(39)) - min(paths.at(39)) < 0.05


@pytest.mark.parametrize(
    ("workers", "sizes"), [(4, [2, 2]), (5, [2, 3]), (2, [2]), (3, [3]), (9, [2, 2, 2, 3])]
)
def test_all_agree_on_groups_that_are_dealt_out_anew_for_every_round(workers, sizes):
    strategy, dealt = NoLoCo(period=3), []
    for t in (2, 5, 8, 11, 14, 17, 20, 23):
        groups = {frozenset([k, *strategy.partners_of(k, workers, t)]) for k in range(workers)}
        assert sorted(map(len, groups)) == sizes
        assert frozenset().union(*groups) == set(range(workers))
        dealt.append(groups)
    assert workers <= 3 or len({frozenset(groups) for groups in dealt}) > 1


def test_who_lost_its_partner_takes_the_outer_step_alone():
    faults = Faults(noticed_after=0.0).crash(rank=1, step=1)
    slopes = Slope(gradients=(1.0, 3.0))
    run, paths = watch(
        NoLoCo(period=1, **HALVES), [0.0, 0.0], slopes, steps=2, compute=Compute(1.0), faults=faults
    )
    assert paths.x[0] == [-1.0, -1 - 0.5 - 0.5]  # v = -1/2 (1 + 3) / 2; then -1/2 - 1/2, of its own progress
    assert run.finished == [0]


def test_a_message_has_two_vectors_and_goes_to_one_partner_a_round():
    at_the_end, after_four_rounds = (
        [node.meter.bytes_sent for node in watch(NoLoCo(period=2), [0.0] * 8, Slope(), steps=steps)[0].nodes]
        for steps in (0, 8)
    )
    sent = [all_ - end for all_, end in zip(after_four_rounds, at_the_end, strict=True)]
    assert sent == [4 * (104 + 2 * 8)] * 8


def test_a_pull_by_which_pairs_drift_apart_is_refused():
    NoLoCo(momentum=0.9, pull=0.7).check(Setting(workers=2))
    with pytest.raises(ValueError, match=r"must stay below 2 \(1 - momentum\^2\) = 0.38"):
        NoLoCo(momentum=0.9).check(Setting(workers=4))
    _, paths = watch_unchecked(NoLoCo(period=1, momentum=0.9), 60)
    assert max(paths.at(59)) - min(paths.at(59)) > 6


@pytest.mark.parametrize(
    ("group", "workers", "limit"),
    [
        (2, 2, 3.8),  # 2 (1 + 0.9): all in one group
        (3, 5, 3.8),
        pytest.param(3, 9, 0.38 / 0.7, marks=pytest.mark.soak),
        pytest.param(2, 16, 0.38, marks=pytest.mark.soak),
        pytest.param(4, 16, 0.38 / 0.55, marks=pytest.mark.soak),
    ],
)
def test_a_larger_group_bears_a_stronger_pull(group, workers, limit):
    strategy = partial(NoLoCo, period=1, momentum=0.9, group=group)
    strategy(pull=0.99 * limit).check(Setting(workers=workers))
    with pytest.raises(ValueError, match="drives the models apart"):
        strategy(pull=1.01 * limit).check(Setting(workers=workers))
    apart = []
    for factor in (0.8, 2.0):
        _, paths = watch_unchecked(strategy(pull=factor * limit), steps=200, workers=workers)
        apart.append(max(paths.at(199)) - min(paths.at(199)))
    assert apart[0] < 1 and apart[1] > 60  # they began 6 apart


def watch_unchecked(strategy, steps, workers=16):
    places = torch.linspace(0, 6, workers).tolist()
    object.__setattr__(strategy, "check", lambda setting: None)
    return watch(strategy, places, Quadratic(lr=0.0), steps=steps)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"group": 1}, "group=1 must be at least 2"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"rate": 0.0}, "rate"),
        ({"pull": -0.1}, "pull"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        NoLoCo(**options)
