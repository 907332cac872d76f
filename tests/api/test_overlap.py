"""Gradients are averaged while back-propagation runs, and come out as if they were not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).with_name("overlapping.py")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", pytest.param("processes", marks=pytest.mark.soak)])
def test_a_loop_that_makes_it_hard(transport):
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--transport", transport, str(LOOP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"worst"' in line]
    assert sorted(t["rank"] for t in told) == [0, 1]
    for worker in told:
        assert worker["worst"] < 1e-6
    if transport == "gloo":
        first, second = (worker["early"] for worker in sorted(told, key=lambda t: t["rank"]))
        assert first[:4] == [0, 5, 0, 5]  # all but the last of six parts, unless a layer is missing
        assert first[12:] == [0] * 4 and second[12:] == [5] * 4  # who clips hands nothing over early
