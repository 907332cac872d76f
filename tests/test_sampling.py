"""What a sample of parameters leaves out by default is soak, and no value of a parameter is left out."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from sampling import LEAST_CASES, covering, leave_products_to_soak


class Case:
    """As much of a collected test as the sample looks at."""

    parent = originalname = "test"

    def __init__(self, values: tuple[str, ...], *marks: str) -> None:
        self.callspec = SimpleNamespace(_idlist=list(values))
        self.marks = {*marks}

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def left(cases: list[Case]) -> list[tuple[str, ...]]:
    leave_products_to_soak(cases)  # type: ignore[arg-type]
    return [tuple(case.callspec._idlist) for case in cases if "soak" not in case.marks]


def test_every_value_of_a_product_stays_in_some_case():
    axes = ["abcd", "123", "xy"]
    stay = left([Case(values) for values in product(*axes)])
    assert [{values[place] for values in stay} for place in range(3)] == [set(axis) for axis in axes]
    assert len(stay) == 4


@pytest.mark.parametrize("marks", [("whole",), ()])
def test_small_products_and_those_that_say_so_stay_whole(marks: tuple[str, ...]):
    values = [*product("abcdefgh"[: LEAST_CASES // 2 + (1 if marks else -1)], "12")]
    assert left([Case(case, *marks) for case in values]) == values


def test_a_list_of_cases_is_no_product():
    values = [(str(number),) for number in range(2 * LEAST_CASES)]
    assert left([Case(case) for case in values]) == values


def test_a_covering_sample_has_every_value_of_either_kind():
    pairs = [*product("abc", [(1, "x"), (2, "y"), (3, "z"), (4, "x"), (5, "y")])]
    cases = [case.values for case in covering(pairs, each=1) if not case.marks]
    assert {first for first, *_ in cases} == {*"abc"}
    assert {second for _, second, _ in cases} == {1, 2, 3, 4, 5}
