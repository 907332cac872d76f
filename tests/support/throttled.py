"""A task whose steps are slow while a file exists, so that its run is not over before a test has acted."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from shoal.core.task import Task

PAUSE_SECONDS = 0.2
"""How long a batch takes at least, while the file exists: few batches, so that little is to be computed."""


@dataclass(frozen=True)
class Pause:
    """Leaves the inputs of a batch as they are, after a while."""

    file: str
    seconds: float

    def __call__(self, x: Tensor) -> Tensor:
        if Path(self.file).exists():
            time.sleep(self.seconds)
        return x


class Throttle:
    """Makes tasks slow, until it is released."""

    def __init__(self, file: Path, seconds: float = PAUSE_SECONDS) -> None:
        self._file = file
        self._seconds = seconds
        file.touch()

    def task(self, task: Task) -> Task:
        """The same task, but slow for now."""
        return replace(task, augment=Pause(str(self._file), self._seconds))

    def release(self) -> None:
        """Let the run go at full speed."""
        self._file.unlink(missing_ok=True)
