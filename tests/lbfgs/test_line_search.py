"""The line search by hand: on a parabola every trial is known."""

from __future__ import annotations

from math import cos, inf, nan, sin

import pytest

from shoal.lbfgs.line_search import LinePoint, Wolfe, between, strong_wolfe


def searched(loss, slope, first, rule=None):
    """The steps that were tried, and what was found."""
    search = strong_wolfe(loss(0.0), slope(0.0), first, rule)
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send((loss(tried[-1]), slope(tried[-1]))))
        except StopIteration as end:
            return tried, end.value


def parabola(minimum):
    return (lambda a: (a - minimum) ** 2), (lambda a: 2 * (a - minimum))


def test_a_step_that_satisfies_both_conditions_is_taken_at_once():
    tried, found = searched(*parabola(1.5), 1.0)  # slope -3 at 0, -1 at 1: 1 <= 0.9 * 3
    assert tried == [1.0] and found.exact and found.point == LinePoint(1.0, 0.25, -1.0)


def test_the_step_is_doubled_while_the_loss_falls_steeply():
    # slope at 0 is -20, at 1 still -18, which is 0.9 * 20; with c2 = 0.5 it goes on: 2 (-16), 4 (-12), 8 (-4)
    tried, found = searched(*parabola(10.0), 1.0, Wolfe(curvature=0.5))
    assert tried == [1.0, 2.0, 4.0, 8.0] and found.exact


def test_a_step_too_long_is_interpolated_by_a_cubic_which_is_exact_on_a_parabola():
    # 16 from the start is higher than the start (36 > 16): between 0 and 10 the cubic has its minimum at 4
    tried, found = searched(*parabola(4.0), 10.0, Wolfe(curvature=1e-9))
    assert tried == [10.0, pytest.approx(4.0, rel=1e-14)]
    assert found.exact and found.evaluations == 2


def test_a_trial_keeps_a_tenth_of_the_bracket_off_its_ends():
    low, high = (
        LinePoint(0.0, 1.0, -2.0),
        LinePoint(100.0, 99.0**2, 2 * 99.0),
    )  # the parabola's minimum is at 1
    assert between(low, high) == 10.0
    assert between(high, low) == 10.0


@pytest.mark.parametrize("bad", [inf, nan])
def test_a_loss_that_is_not_finite_is_too_far(bad):
    loss, slope = parabola(1.0)
    tried, found = searched(lambda a: loss(a) if a < 3 else bad, lambda a: slope(a) if a < 3 else bad, 8.0)
    assert tried == [8.0, 4.0, 2.0, pytest.approx(1.0)]  # the middle, twice; 2 is as high as the start
    assert found.exact


def test_it_gives_up_after_so_many_evaluations_with_the_best_that_it_saw():
    tried, found = searched(lambda a: -a, lambda a: -1.0, 1.0, Wolfe(most=4))
    assert tried == [1.0, 2.0, 4.0, 8.0]
    assert not found.exact and found.point.step == 8.0


def test_nothing_is_found_where_no_step_has_less_loss():
    _, found = searched(lambda a: abs(a), lambda a: -1.0 if a <= 0 else 1.0, 1.0)  # the slope at 0 is a lie
    assert not found.exact and found.point.step == 0.0


@pytest.mark.parametrize("first", [0.01, 0.3, 1.0, 7.0, 40.0])
def test_both_conditions_hold_on_a_function_with_many_valleys(first):
    loss, slope = (lambda a: 0.1 * a - sin(a)), (lambda a: 0.1 - cos(a))
    rule = Wolfe(curvature=0.1)
    _, found = searched(loss, slope, first, rule)
    start = LinePoint(0.0, loss(0.0), slope(0.0))
    assert found.exact and rule.falls(start, found.point) and rule.is_flat(start, found.point)
