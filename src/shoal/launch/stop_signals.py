"""What Ctrl-C, SIGTERM, SIGHUP and SIGQUIT do to a launcher, and to the processes that it starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from shoal.core.errors import Interrupted

STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""What asks a launcher to stop: a terminal sends all but the second, a scheduler or `timeout` that one."""

Handler = Callable[[int, FrameType | None], Any]


class StopSignal(KeyboardInterrupt):
    """A signal came. It is a KeyboardInterrupt, so what cleans up after Ctrl-C cleans up after each."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {name_of(number)}")
        self.number = number


def name_of(number: int) -> str:
    """Ctrl-C or SIGTERM, for people."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def stopped_by(number: int, more: str = "") -> Interrupted:
    """The error of a run that a signal has ended."""
    stop = Interrupted(f"stopped by {name_of(number)}{more}")
    stop.signal = number
    return stop


def number_of(stop: BaseException) -> int:
    """The signal behind an Interrupted, a StopSignal or a plain KeyboardInterrupt."""
    if isinstance(stop, Interrupted):
        return stop.signal
    return stop.number if isinstance(stop, StopSignal) else signal.SIGINT


@contextmanager
def stop_signals(is_stopping: Callable[[], bool], stop: Callable[[int], None]) -> Iterator[None]:
    """Have the first signal call `stop` with its number, and another one raise StopSignal.

    `stop` may interrupt anything, so it must only take a note.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if is_stopping():
            raise StopSignal(number)
        stop(number)

    with _handled_by(handle):
        yield


@contextmanager
def signals_raise() -> Iterator[None]:
    """Have the signals that would end this process at once raise StopSignal, so that it cleans up."""
    with _handled_by(_raise, instead_of=(signal.SIG_DFL, signal.default_int_handler)):
        yield


@contextmanager
def signals_kill() -> Iterator[None]:
    """Inside `signals_raise`, have all but Ctrl-C end this process at once: another launcher started it."""
    with _handled_by(signal.SIG_DFL, instead_of=(_raise,), numbers=STOPPING[1:]):
        yield


@contextmanager
def signals_exit() -> Iterator[None]:
    """Have a signal end this process at once with one sentence: there is nothing to clean up yet."""
    with _handled_by(_exit):
        yield


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Have processes that start meanwhile ignore Ctrl-C, which is meant for the launcher."""
    with _handled_by(signal.SIG_IGN, numbers=(signal.SIGINT,)):
        yield


@contextmanager
def temporary_folder(prefix: str = "shoal-") -> Iterator[str]:
    """A folder that is gone after the block, also if a signal ends it."""
    import tempfile  # not before `shoal` can be stopped

    with signals_raise():
        folder = tempfile.TemporaryDirectory(prefix=prefix)
        try:
            yield folder.name
        finally:
            with _handled_by(signal.SIG_IGN):
                folder.cleanup()


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise StopSignal(number)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    os.write(sys.stderr.fileno(), f"shoal: stopped by {name_of(number)}\n".encode())
    os._exit(128 + number)


@contextmanager
def _handled_by(
    handler: Handler | signal.Handlers,
    instead_of: tuple[Any, ...] | None = None,
    numbers: Sequence[int] = STOPPING,
) -> Iterator[None]:
    """Let `handler` handle the signals that are not ignored, as under nohup; or those with such a handler.

    Signals reach the main thread alone: in another one nothing changes.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            now = signal.getsignal(number)
            if now not in (signal.SIG_IGN, None) if instead_of is None else now in instead_of:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
