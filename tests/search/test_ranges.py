"""Ranges: draws, perturbations and places, with the numbers worked out by hand."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.search.ranges import Choice, Interval, read_range


class Coin(Random):
    """Every draw is the same number."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


HEADS, TAILS = Coin(0.0), Coin(0.9)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("log", 1e-4, 1.0), Interval(1e-4, 1.0, log=True)),
        ("log 1e-4..1", Interval(1e-4, 1, log=True)),
        ((0.0, 0.99), Interval(0.0, 0.99)),
        ("0..0.99", Interval(0, 0.99)),
        ("1..8", Interval(1, 8, integer=True)),
        ("log 8..512", Interval(8, 512, log=True, integer=True)),
        ([16, 32], Choice((16, 32))),
        ("16,32", Choice((16, 32))),
        ("true,false", Choice((True, False))),
        ("none,top_k", Choice(("none", "top_k"))),
        (0.9, Choice((0.9,))),
        ((0.1234561, 0.1234562), Interval(0.1234561, 0.1234562)),
        ((1.0, 8.0), Interval(1.0, 8.0)),
    ],
)
def test_a_range_is_read_from_what_people_write(given, wanted):
    assert read_range(given) == wanted
    assert read_range(wanted) is wanted
    assert read_range(wanted.text()) == wanted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("1..1", "first number must be below"),
        ((3.0, 1.0), "first number must be below"),
        (("log", 0.0, 1.0), "begins above 0"),
        ("a..b", "ends are not numbers"),
        ("log 3", "no range"),
        ("log1e-4..1", "ends are not numbers"),  # not a linear range by mistake
        ("log:1e-4..1", "ends are not numbers"),
        ("log", "no range"),
        ("", "no range"),
        ([], "at least one value"),
        ([1, 1], "names a value twice"),
        ({"low": 1}, "no range"),
        ((1, 2, 3), "no range"),
    ],
)
def test_what_is_no_range_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        read_range(given)


def test_a_number_is_explored_by_a_fifth_and_stays_within_its_bounds():
    lr = Interval(0.1, 1.0, log=True)
    assert lr.explore(0.5, HEADS, 0.2) == 0.6  # 0.5 * 1.2
    assert lr.explore(0.5, TAILS, 0.2) == 0.4  # 0.5 * 0.8
    assert lr.explore(0.9, HEADS, 0.2) == 1.0
    assert lr.explore(0.11, TAILS, 0.2) == 0.1


def test_a_whole_number_is_rounded_so_that_it_can_grow_again():
    period = Interval(1, 100, integer=True)
    fallen = [10]
    for _ in range(9):
        fallen.append(period.explore(fallen[-1], TAILS, 0.2))
    assert fallen == [10, 8, 6, 5, 4, 3, 2, 1, 1, 1]  # 6.4, 4.8, 4.0, 3.2, 2.4: rounded; 1.6 is moved by one
    assert period.explore(3, HEADS, 0.2) == 4  # 3.6; int(3.6) would stay at 3 for ever
    assert [period.explore(n, HEADS, 0.2) for n in (1, 2, 100)] == [2, 3, 100]  # 1.2 and 2.4 would stay


def test_a_choice_moves_one_place_and_stays_at_the_ends():
    batch = Choice((16, 32, 64))
    assert [batch.explore(v, HEADS, 0.2) for v in (16, 32, 64)] == [32, 64, 64]
    assert [batch.explore(v, TAILS, 0.2) for v in (16, 32, 64)] == [16, 16, 32]
    assert batch.explore(48, TAILS, 0.2) == 64  # not in the list: drawn anew, and 0.9 is the last third


def test_places_are_even_thirds_of_a_choice_and_decades_of_a_logarithm():
    assert [Choice((1, 2, 3)).at(u) for u in (0.0, 0.33, 0.34, 0.99, 1.0)] == [1, 1, 2, 3, 3]
    assert Interval(1e-4, 1.0, log=True).at(0.5) == pytest.approx(1e-2)
    assert [Interval(1, 4, integer=True).at(u) for u in (0.0, 0.24, 0.26, 1.0)] == [1, 1, 2, 4]


@given(st.floats(0, 1), st.sampled_from(["log 1e-4..1", "0..0.5", "1..9", "log 8..512", "16,32,64"]))
def test_the_place_of_a_value_leads_back_to_it(place, text):
    found = read_range(text)
    value = found.at(place)
    assert found.at(found.place(value)) == pytest.approx(value)
    assert 0.0 <= found.place(value) <= 1.0


@pytest.mark.parametrize("text", ["log 1e-4..1", "0..0.5", "1..9", "16,32,64"])
def test_a_mutation_is_another_value_of_the_range(text):
    found, rng = read_range(text), Random(1)
    value = found.sample(rng)
    for _ in range(100):
        other = found.mutate(value, rng)
        assert 0.0 <= found.place(other) <= 1.0
        value = other
    assert len({found.mutate(value, Random(k)) for k in range(50)}) > 1
