"""Logger: what a place for the figures of runs has to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Receives the figures of one run after the other: `start`, many times `log`, then `finish`.

    Subclass it, or write a class with these three methods. They are called from a thread that belongs to this
    logger and to one run; a method may take its time. If one raises, a warning says so and the logger is left
    out for the rest of that run.
    """

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        """Begin a run. `config` holds its settings as plain values."""

    def log(self, figures: Mapping[str, float], *, step: int, samples: int, seconds: float) -> None:
        """Take the figures of one moment, by name. All are finite.

        `step` is the slowest worker's, `samples` are those of all workers, `seconds` count from the start of
        training and are virtual in a simulation. Test figures come after training, for moments in the past.
        """
        ...

    def finish(self, state: str) -> None:
        """End the run. `state` is "done", "failed" or "interrupted"."""


def free_path(path: Path) -> Path:
    """`path`, or with -2, -3, … appended to its stem the first that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def config_text(value: Any) -> str:
    """A setting as text, for places that store text only."""
    return "none" if value is None else str(value)
