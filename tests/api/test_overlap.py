"""Gradients are averaged while back-propagation runs, and come out as if they were not."""

import json
from pathlib import Path

import pytest

from forked import run_warm

LOOP = Path(__file__).with_name("overlapping.py")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize("transport", ["gloo", "processes"])
def test_a_loop_that_makes_it_hard(transport):
    lines = run_warm(LOOP, workers=2, strategy="sync", transport=transport)
    told = [json.loads(line) for line in lines if '"worst"' in line]
    assert sorted(t["rank"] for t in told) == [0, 1]
    for worker in told:
        assert worker["worst"] < 1e-6
    if transport == "gloo":
        first, second = (worker["early"] for worker in sorted(told, key=lambda t: t["rank"]))
        assert first[:4] == [0, 5, 0, 5]  # all but the last of six parts, unless a layer is missing
        assert first[12:] == [0] * 4 and second[12:] == [5] * 4  # who clips hands nothing over early
