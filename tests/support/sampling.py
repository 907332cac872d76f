"""Sampled parameters: every value of every axis in some case; the full product is left to `make soak`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any

import pytest

LEAST_CASES = 6
"""A product of parameters with fewer cases runs whole."""


def leave_products_to_soak(items: Iterable[pytest.Item]) -> None:
    """Mark as soak what a covering sample of each test's cases leaves out.

    Where `parametrize` is stacked, its axes multiply. Every value of every axis stays in some case.
    """
    tests: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("soak"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        if len(cases) >= LEAST_CASES and not cases[0].get_closest_marker("whole"):
            chosen = {id(case) for case in _covering_cases(cases)}
            for case in cases:
                if id(case) not in chosen:
                    case.add_marker(pytest.mark.soak)


def _covering_cases(cases: list[Any]) -> list[Any]:
    """Cases in which every value occurs: each the one with most values that those before it lack."""
    values = {id(case): {*enumerate(case.callspec._idlist)} for case in cases}
    lacking = set().union(*values.values())
    chosen = []
    while lacking:
        best = max(cases, key=lambda case: len(values[id(case)] & lacking))
        lacking -= values[id(best)]
        chosen.append(best)
    return chosen


def mostly_soak(cases: Sequence[Any], few: int) -> list[Any]:
    """The cases, of which `few` run by default: the first, and others as far apart."""
    chosen = {k * len(cases) // few for k in range(few)}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if place in chosen else (pytest.mark.soak,),
        )
        for place, case in enumerate(cases)
    ]


def sampled(*axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, of which only a diagonal runs by default: as many cases as the longest has."""
    longest = max(len(axis) for axis in axes)
    chosen = {tuple(k % len(axis) for axis in axes) for k in range(longest)}
    cases = []
    for places in product(*(range(len(axis)) for axis in axes)):
        case = [axis[place] for axis, place in zip(axes, places, strict=True)]
        marks = () if places in chosen else (pytest.mark.soak,)
        cases.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return cases


def covering(pairs: Sequence[tuple[Any, Any]], each: int = 2) -> list[Any]:
    """The pairs, of which `each` for every first value run by default, and at least one for every second.

    A second value may be a tuple, which becomes several arguments.
    """
    seconds: dict[Any, list[Any]] = {}
    for first, second in pairs:
        seconds.setdefault(first, []).append(second)
    chosen = set()
    for turn, (first, own) in enumerate(seconds.items()):
        chosen |= {(first, own[(turn + k * len(own) // each) % len(own)]) for k in range(each)}
    turns = cycle(seconds)
    for second in dict.fromkeys(second for _, second in pairs):
        if second not in {other for _, other in chosen}:
            chosen.add((next(first for first in turns if second in seconds[first]), second))
    return [
        pytest.param(
            *(first, *(second if isinstance(second, tuple) else (second,))),
            marks=() if (first, second) in chosen else (pytest.mark.soak,),
        )
        for first, second in pairs
    ]
