"""Learning curves continued: power laws are found again, and ratios of samples read off."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, inf, isinf, log, sqrt

import pytest
import torch
from torch import nn

from shoal.core.task import Data, Task
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, PowerLaw, continued, ratio_of
from shoal.planning.forecasting import forecast_all
from shoal.planning.objectives import Objective
from shoal.planning.run_time import RunCost
from shoal.planning.short_runs import Allowance, Bench, Race, TrialRun, Tried, race
from shoal.planning.training_plan import FORMULA_DOUBT
from shoal.planning.workload import Workload
from shoal.sim import Compute


def curve(slower: float = 1.0, points: int = 12, noise: float = 0.0) -> list[dict[str, float]]:
    """The tests of a run whose loss is 10 m^-0.5 and error 80 m^-0.3, at m samples over `slower`."""
    found = []
    for k in range(1, points + 1):
        m = 1000.0 * k
        off = 1 + noise * (-1) ** k
        found.append(
            {
                "samples": m,
                "test_loss": 10 * (m / slower) ** -0.5 * off,
                "test_accuracy": 100 - 80 * (m / slower) ** -0.3,
            }
        )
    return found


def test_a_power_law_is_found_again_and_continued():
    law = PowerLaw.fit([(p["samples"], p["test_loss"]) for p in curve()])
    assert law is not None
    assert law.slope == pytest.approx(0.5)
    assert law.at(1e6).value == pytest.approx(0.01)
    assert law.samples_to(0.01) == pytest.approx(1e6)
    assert isinf(law.samples_to(0.0))


def test_doubt_grows_with_the_distance_and_with_the_noise():
    quiet, noisy = (
        PowerLaw.fit([(p["samples"], p["test_loss"]) for p in curve(noise=n)]) for n in (0.01, 0.1)
    )
    assert quiet is not None
    assert noisy is not None
    near, far = quiet.at(1e4), quiet.at(1e7)
    assert far.high / far.low > near.high / near.low
    assert noisy.at(1e7).high > quiet.at(1e7).high


def test_when_a_target_is_reached_is_as_uncertain_as_the_curve_over_its_slope():
    law = PowerLaw.fit([(p["samples"], p["test_loss"]) for p in curve(noise=0.1)])
    assert law is not None
    at = law.at(1e6)
    assert law.samples_doubt(at.value) == pytest.approx(log(at.high / at.value) / law.slope)
    assert isinf(law.samples_doubt(0.0))


def test_seconds_to_a_target_are_as_uncertain_as_the_curve_of_one_worker():
    baseline = Baseline.of([curve(noise=0.1)])
    assert baseline is not None
    cost, exact = RunCost(1.0, 1e6, 1e3, 100.0, 1.0), Estimate(1.0, 1.0, 1.0)
    found = Race(baseline, [Tried(SINGLE, exact, 1e-3, 0.0, 1000, 1)], 0.0)
    workload = Workload("t", 1000, 10, 1000)
    epochs, target = (
        forecast_all({SINGLE: cost}, workload, goal, found)[0].seconds
        for goal in (Objective(5), Objective(5, 0.05, is_loss=True))
    )
    assert epochs is not None and log(epochs.high / epochs.value) == pytest.approx(FORMULA_DOUBT)
    assert target is not None and target.value == pytest.approx(baseline.loss.samples_to(0.05) / 1000)
    both = hypot(FORMULA_DOUBT, baseline.loss.samples_doubt(0.05))
    assert log(target.high / target.value) == pytest.approx(both) and both > 2 * FORMULA_DOUBT


def test_a_figure_that_nobody_knows_has_bounds_all_the_same():
    """A flat, noisy curve: the doubt of when it is at a target is more than e can be raised to."""
    law = PowerLaw(height=0.0, slope=0.02, middle=8.0, points=3, width=0.05, residual=1.0)
    assert law.samples_doubt(0.8) > 710
    baseline = Baseline([(0.0, 1.0), (3000.0, 0.9)], law, None)
    better = [{"samples": 3000.0, "test_loss": 1e-9}]
    ratio = ratio_of([better], baseline, 0.0)
    found = Race(baseline, [Tried(SINGLE, ratio, 1e-3, 0.0, 1000, 1)], 0.0)
    goal, cost = Objective(5, 0.8, is_loss=True), RunCost(1.0, 1e6, 1e3, 100.0, 1.0)
    (told,) = forecast_all({SINGLE: cost}, Workload("t", 1000, 10, 1000), goal, found)
    for figure in (ratio, told.seconds, told.score, told.key(goal)):
        assert figure is not None and 0 < figure.low < figure.value < figure.high < inf
        assert figure.high / figure.value >= 999


def test_too_few_points_are_no_law():
    assert PowerLaw.fit([(1.0, 1.0), (2.0, 0.5)]) is None
    assert Baseline.of([[]]) is None


@pytest.mark.parametrize("slower", [1.0, 2.0, 3.0])
def test_the_ratio_of_samples_is_read_off(slower: float):
    baseline = Baseline.of([curve()])
    assert baseline is not None
    ratio = ratio_of([curve(slower)], baseline, seed_spread=0.0)
    assert ratio.value == pytest.approx(slower, rel=0.05)
    assert ratio.low < slower < ratio.high


def test_beyond_the_lowest_loss_of_one_worker_a_ratio_is_one_and_in_doubt():
    baseline = Baseline.of([curve()])
    assert baseline is not None
    ratio = ratio_of([curve(0.4)], baseline, seed_spread=0.0)
    assert ratio.value == 1
    assert ratio.low < 0.4


def test_one_worker_is_the_mean_of_its_seeds_however_long_and_their_doubt_is_added():
    short, long = curve(0.8, points=6), curve(1.25)
    both = Baseline.of([short, long])
    assert both is not None
    assert both.seeds == 2
    assert both.points[2] == (3000.0, pytest.approx((short[2]["test_loss"] + long[2]["test_loss"]) / 2))
    assert both.points[-1] == (12_000.0, pytest.approx(long[-1]["test_loss"]))
    one, two = (ratio_of([curve(3.0)], replace(both, seeds=n), 0.3) for n in (1, 2))
    assert one.high > two.high


def test_a_run_that_came_to_nothing_has_no_ratio():
    baseline = Baseline.of([curve()])
    assert baseline is not None
    assert ratio_of([], baseline, 0.0) == Estimate(inf, inf, inf)
    learnt_nothing = [{**point, "test_loss": 2.3} for point in curve()]
    assert ratio_of([learnt_nothing], baseline, 0.0) == Estimate(inf, inf, inf)


def test_runs_that_differ_by_seed_widen_the_interval():
    baseline = Baseline.of([curve()])
    assert baseline is not None
    narrow, wide = (ratio_of([curve(2.0)], baseline, spread) for spread in (0.0, 0.3))
    assert wide.high / wide.low > narrow.high / narrow.low


def test_a_ratio_falls_towards_one_as_training_goes_on():
    early = Estimate(4.0, 3.6, 4.4)
    near, far = continued(early, 10_000, 10_000), continued(early, 10_000, 1_000_000)
    assert 4.0 > near.value > far.value > 1
    assert far.high / far.value > near.high / near.value > 1
    # after as many samples of its own a setting has come less far than where one worker is after them
    assert continued(early, 10_000, 1_000_000, own=True).value > far.value
    better = Estimate(0.8, 0.7, 0.9)
    assert continued(better, 10_000, 1_000_000).value == 0.8
    assert continued(Estimate(inf, inf, inf), 10, 100) == Estimate(inf, inf, inf)


class WrittenDown(Bench):
    """Short runs that were written down: one worker's seeds differ by a fifth of the samples."""

    def run(self, contender: Contender, samples: int, seed: int) -> TrialRun:
        slower = (1.0, 1.2)[seed] if contender == SINGLE else 3.0
        return TrialRun(contender, seed, samples, curve(slower), 1.0, 0.0, taken=0.01)


def test_the_doubt_of_a_seed_is_the_standard_deviation_of_one_workers_runs():
    task = Task("t", lambda: nn.Linear(1, 1), lambda: Data(*[torch.zeros(4, 1)] * 4), batch=1)
    bench = WrittenDown(task, None, lambda _: Compute(), None)
    found = race(bench, [Contender("sync", 2)], Allowance(100.0, 12_000, 1e-5), lambda _, ratio: ratio)
    assert found is not None
    assert found.baseline.seeds == 2
    assert found.seed_spread == pytest.approx(log(1.2) / sqrt(2), rel=0.1)
