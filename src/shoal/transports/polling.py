"""Polling: waiting for what has to be asked for, without keeping a core busy."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_SECONDS = 1e-6
LONGEST_SECONDS = 1e-3


class Polling:
    """Pauses that grow from nearly nothing to 1 ms while nothing happens."""

    def __init__(self) -> None:
        self._seconds = SHORTEST_SECONDS

    def reset(self) -> None:
        """Something happened: ask often again."""
        self._seconds = SHORTEST_SECONDS

    def pause(self) -> None:
        """Let others have the core, longer each time."""
        time.sleep(self._seconds)  # also lets go of the interpreter, which asking again at once would not
        self._seconds = min(1.25 * self._seconds, LONGEST_SECONDS)


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Ask until it is done; False if it is not after so many seconds."""
    deadline = time.monotonic() + seconds
    polling = Polling()
    while not done():
        if time.monotonic() > deadline:
            return False
        polling.pause()
    return True
