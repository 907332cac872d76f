"""Background: a thread that computes gradients while its node answers messages."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.launch.drive import drive

T = TypeVar("T")


class BackgroundThread:
    """One thread, started on first use, which ends with the process.

    All work goes to the same thread: torch creates a pool of OpenMP threads for every thread that computes.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Future[T]:
        """Start `work` in the thread and return its future at once."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal computes")
        return self._thread.submit(drive, work)

    def close(self) -> None:
        """End the thread after the work it has."""
        if self._thread is not None:
            self._thread.shutdown()
