"""A task whose steps are as slow as a file says, so that its run is not over before a test has acted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from shoal.core.task import Task

PAUSE_SECONDS = 0.2
"""How long a batch takes at least, by default: few batches, so that little is to be computed."""

LOOK_SECONDS = 0.02
"""How often a batch that is held up looks whether it still is."""


@dataclass(frozen=True)
class Pause:
    """Leaves the inputs of a batch as they are, after the seconds that a file says, if it is there."""

    file: Path

    def __call__(self, x: Tensor) -> Tensor:
        began = time.monotonic()
        with suppress(FileNotFoundError):
            while (left := float(self.file.read_text()) - (time.monotonic() - began)) > 0:
                time.sleep(min(left, LOOK_SECONDS))
        return x


@dataclass(frozen=True)
class SlowLoss:
    """The same loss, after the same pause: for tasks that may not change their inputs."""

    loss: Callable[[Tensor, Tensor], Tensor]
    pause: Pause

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.pause(outputs), labels)


class Throttle:
    """Makes tasks slow, until it is released."""

    def __init__(self, file: Path, seconds: float = PAUSE_SECONDS) -> None:
        self._file = file
        self.slow(seconds)

    def task(self, task: Task) -> Task:
        """The same task, but slow for now."""
        return replace(task, augment=Pause(self._file))

    def task_with_slow_loss(self, task: Task) -> Task:
        """The same where the loss takes the time, in tests of the model, too."""
        return replace(task, loss=SlowLoss(task.loss, Pause(self._file)))

    def slow(self, seconds: float) -> None:
        """From now on, also for the batch that is held up now, a batch takes so long at least."""
        written = self._file.with_suffix(".new")
        written.write_text(str(seconds))
        written.replace(self._file)  # so that nobody reads half of it

    def release(self) -> None:
        """Let the run go at full speed."""
        self._file.unlink(missing_ok=True)
