"""Every algorithm with a server learns as much as synchronous training does from the same samples."""

from __future__ import annotations

import functools

import pytest
import torch

import shoal
from shoal.core.errors import DataMissing
from shoal.strategies import STRATEGIES
from shoal.testing import blobs

SEARCHES = ("sandblaster",)  # an epoch is one evaluation, not many steps
CENTRAL = [word for word in STRATEGIES if STRATEGIES.make(word).servers and word not in SEARCHES]
POINTS = 1.5
"""Of test accuracy that an algorithm may be behind synchronous training."""

SETTINGS = {
    "digits": {"epochs": 20, "lr": 0.1},
    "mnist": {"epochs": 2, "lr": 0.05},
}
OPTIONS = {
    "async_diloco": {"period": 4},
    "decoupled_diloco": {"period": 8, "fragments": 2, "overlap": 2},
    "halos": {"period": 4, "exchange": 4},
    "easgd": {"period": 2},
    "eamsgd": {"period": 2, "momentum": 0.5},
}


def train(task: str, word: str, **options: object) -> shoal.Result:
    strategy = STRATEGIES.make(word, **OPTIONS.get(word, {}))
    try:
        return shoal.run(task, strategy, workers=4, seed=1, **SETTINGS[task], **options)
    except DataMissing:
        pytest.skip(f"{task} is not on this machine; set SHOAL_DATA")


@functools.cache
def synchronous(task: str) -> float:
    return train(task, "sync", transport="sim").test_accuracy


def check(task: str, word: str) -> None:
    result = train(task, word)
    assert result.test_accuracy > synchronous(task) - POINTS
    assert sum(result.staleness.values()) > 0, "the report has no staleness to show"
    learnt = result.curve[-1]["samples"]
    assert learnt == result.samples


@pytest.mark.slow
@pytest.mark.soak  # tests/api/test_run.py has some that learn
@pytest.mark.parametrize("word", CENTRAL)
def test_digits(word):
    check("digits", word)


@pytest.mark.slow
def test_windows_of_two_servers_in_processes_of_their_own():
    """Each server owns a part of the vector, and has no use for that of the other."""
    try:
        result = shoal.run(
            "digits", "hogwild", workers=2, servers=2, transport="processes", epochs=3, lr=0.1, seed=0
        )
    except DataMissing:
        pytest.skip("digits is not on this machine")
    assert result.test_accuracy > 60


@pytest.mark.soak
@pytest.mark.parametrize("word", CENTRAL)
def test_mnist(word):
    check("mnist", word)


@pytest.mark.slow
def test_one_worker_of_hogwild_on_real_memory_is_serial_sgd():
    one, alone = (shoal.run(blobs(), word, workers=1, epochs=2, seed=3) for word in ("hogwild", "single"))
    for ours, serial in zip(one.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(ours, serial, atol=1e-6)
