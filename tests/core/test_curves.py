"""The end of a learning curve with its spread, and the time to a given score."""

from __future__ import annotations

import pytest

from shoal.core.curves import Final, best, final, finals, seconds_to


def curve(*accuracies, losses=None, samples=None):
    count = len(accuracies)
    samples = samples or [100 * index for index in range(count)]
    losses = losses or [1.0] * count
    return [
        {"seconds": float(index), "samples": samples[index], "test_accuracy": a, "test_loss": losses[index]}
        for index, a in enumerate(accuracies)
    ]


EVEN = [0, 50, 60, 70, 80, 90, 91, 92, 93, 94, 95, 96, 95, 97]


def test_the_end_is_the_mean_of_three_evaluations_and_their_standard_deviation():
    assert final(curve(*EVEN), "test_accuracy") == Final(96.0, 1.0, 3)


def test_evaluations_before_the_last_fifth_of_the_samples_do_not_count():
    few = curve(9, 90, 95, 97, samples=[0, 500, 850, 1000])
    assert final(few, "test_accuracy") == Final(96.0, pytest.approx(2**0.5), 2)


def test_one_evaluation_has_no_spread():
    assert final(curve(9, 90, samples=[0, 100]), "test_accuracy") == Final(90.0, None, 1)


def test_a_run_that_ends_without_a_figure_has_none():
    assert final([], "test_accuracy") is None
    assert final(curve(90, None), "test_accuracy") is None
    assert final(curve(90, 90, losses=[1.0, float("nan")]), "test_loss") is None


def test_the_task_s_own_metrics_end_in_the_same_way():
    points = [{**point, "metrics": {"F1 %": point["test_accuracy"] - 1}} for point in curve(*EVEN)]
    assert finals(points)["F1 %"] == {"mean": 95.0, "spread": 1.0, "evaluations": 3}
    assert finals(points).keys() == {"test_accuracy", "test_loss", "F1 %"}


def test_the_time_to_an_accuracy_is_that_of_the_first_evaluation_which_reaches_it():
    points = curve(10, 96, 94, 97)
    assert [seconds_to(points, "test_accuracy", x) for x in (95, 96, 97, 98)] == [1.0, 1.0, 3.0, None]


def test_a_loss_is_reached_from_above():
    points = curve(0, 0, 0, losses=[2.0, 0.5, 0.7])
    assert seconds_to(points, "test_loss", 0.6) == 1.0 and seconds_to(points, "test_loss", 0.1) is None
    assert best(points, "test_loss") == 0.5


def test_the_best_is_the_highest_and_holes_are_left_out():
    assert best(curve(10, 97, None, 96), "test_accuracy") == 97
    assert best(curve(None), "test_accuracy") is None
