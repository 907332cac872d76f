"""Finished runs to report on: plain values, as a training run leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = dict[str, Any]


def node(rank: int, role: str = "worker", **changes: Any) -> Run:
    return {
        "role": role, "rank": rank, "steps": 100, "samples": 6400, "loss": 0.3,
        "compute_seconds": 6.0, "wait_seconds": 1.2, "send_seconds": 0.8,
        "bytes_sent": 1000, "bytes_received": 1000, "messages_sent": 10, "waited_for": {}, "faults": [],
        **changes,
    }  # fmt: skip


def run(strategy: str, workers: int = 4, **changes: Any) -> Run:
    ended = {"seconds": 10.0, "test_accuracy": 97.0, "test_loss": 0.1, **changes}
    seconds, accuracy = ended["seconds"], ended["test_accuracy"]
    points = [
        (0.0, 0, None if accuracy is None else 10.0, 2.3),
        ((seconds or 0.0) / 2, 12_800, None if accuracy is None else 90.0, 0.4),
        (seconds, 25_600, accuracy, ended["test_loss"]),
    ]
    keys = ("seconds", "samples", "test_accuracy", "test_loss")
    return {
        "strategy": strategy, "codec": "none", "transport": "processes", "workers": workers,
        "test_accuracy": 97.0, "test_loss": 0.1, "seconds": 10.0, "samples": 25_600,
        "samples_per_second": 2_560.0, "bytes_sent": 12_400_000, "wait_fraction": 0.12,
        "staleness_mean": None,
        "config": {"task": "digits", "period": 50, "seed": 0, "epochs": 5, "batch": 64, "lr": 0.1},
        "task": "digits", "parameters": 101_770, "curve": [dict(zip(keys, p, strict=True)) for p in points],
        "staleness": {}, "nodes": [node(rank) for rank in range(workers)],
        **changes,
    }  # fmt: skip


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return run


@pytest.fixture
def make_node() -> Callable[..., Run]:
    return node


@pytest.fixture
def runs() -> list[Run]:
    """One worker, a strategy that pays, one that does not, and one with a server and stale updates."""
    slow = {"waited_for": {"3": 2.0, "1": 0.5}}
    return [
        run(
            "single",
            1,
            samples_per_second=1_000.0,
            seconds=29.0,
            test_accuracy=97.4,
            bytes_sent=0,
            wait_fraction=0.0,
        ),
        run("bmuf", samples_per_second=2_900.0, nodes=[node(rank, **slow) for rank in range(4)]),
        run(
            "sync",
            codec="top_k(0.01)",
            samples_per_second=620.0,
            seconds=46.8,
            test_accuracy=97.41,
            wait_fraction=0.61,
        ),
        run(
            "downpour",
            staleness={"0": 12, "1": 40, "3": 5},
            staleness_mean=0.96,
            nodes=[*(node(rank, waited_for={"4": 1.0}) for rank in range(4)), node(4, "server")],
        ),
    ]
