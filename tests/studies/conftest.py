"""What all tests of studies share: short measurements, and one thread for small models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.profiling import step


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of a busy machine wait for one another longer than a small model takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
