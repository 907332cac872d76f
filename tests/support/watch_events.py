"""Progress events as a node sends them."""

from __future__ import annotations

from typing import Any


def report(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank, "role": "worker", "step": 10, "steps": 100, "loss": 1.0, "seconds": 1.0, "samples": 640,
        "samples_per_second": 1000.0, "wait_fraction": 0.1, "compute_fraction": 0.8, "bytes_sent": 1000,
        "saved_seconds": None, "staleness": None, "state": "computing", "awaits": "", **changes,
    }  # fmt: skip
