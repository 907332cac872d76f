"""Sampled parameters: every value of every axis in some case; the full product is left to `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


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
