"""What Ctrl-C and SIGTERM do to a launcher, and to the processes that it starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(is_stopping: Callable[[], bool], stop: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C or SIGTERM call `stop`, and another one raise KeyboardInterrupt.

    `stop` may interrupt anything, so it must only take a note. Signals reach the main thread alone: in
    another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: object) -> None:
        if is_stopping():
            raise KeyboardInterrupt
        stop()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Have processes that start meanwhile ignore Ctrl-C, which is meant for the launcher."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
