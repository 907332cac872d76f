"""What tests of whole runs share."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import processes
from shoal.launch.crew import Crew


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[Crew]:
    """The crews of the runs that are started, so that a test can find their processes."""
    made: list[Crew] = []

    class Seen(Crew):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(processes, "Crew", Seen)
    return made
