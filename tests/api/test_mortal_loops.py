"""Workers of a user's own loop are killed: the others go on, they come back, and every sample counts once."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts import final_weights
from scripts import run_loop as run_a_script

run_loop = partial(run_a_script, script=Path(__file__).with_name("mortal_loop.py"), workers=3, strategy=None)
pytestmark = [pytest.mark.usefixtures("warm_scripts"), pytest.mark.slow, pytest.mark.timeout(120)]

SAMPLES = 60


def ended(printed: list[str]) -> list[torch.Tensor]:
    """The final weights of those who came to the end, which all have the same."""
    found = [final_weights(lines) for lines in printed if "weights" in lines]
    assert found
    assert all(torch.equal(own, found[0]) for own in found)
    assert sum("is first" in lines for lines in printed) == 1
    return found


def kill(*moments: str) -> list[str]:
    return ["--kill", *moments]


@pytest.mark.parametrize(
    ("moments", "epochs"),
    [
        (["1:3"], 8),
        (["0:5"], 8),
        (["1:4", "2:4"], 8),
        (["1:eval"], 2),
        (["0:end"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_sample_counts_once_an_epoch_whoever_is_killed(moments, epochs):
    printed = run_loop("--epochs", str(epochs), *kill(*moments))
    for counts in ended(printed):
        assert torch.equal(counts, torch.full((SAMPLES,), float(epochs)))
    if epochs > 2:
        assert sum("goes on from" in lines for lines in printed) == len(moments)
        assert len(ended(printed)) == 3


@pytest.fixture(autouse=True)
def quietly(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield
