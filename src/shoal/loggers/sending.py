"""LoggedRun: hands the rows of one run to its loggers, each in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shoal.loggers.figures import FigureTable, Row
from shoal.loggers.logger import Logger

LOG = logging.getLogger("shoal")

MOST_WAITING = 1000
"""Calls that may wait for a slow logger; rows beyond that are dropped, and a warning says how many."""

FINISH_SECONDS = 60.0
"""How long a run waits at its end for a logger that has not stored everything yet."""


class LoggedRun:
    """One run and its loggers. An observer of a recording: it gets the events, and the result at the end."""

    def __init__(
        self, loggers: Sequence[Logger], name: str, config: Mapping[str, Any], workers: int, servers: int
    ) -> None:
        self._table = FigureTable(workers, servers)
        self._threads = [LoggerThread(logger) for logger in loggers]
        for thread in self._threads:
            thread.call("start", name, config)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take a progress event, and pass on a row if one is due."""
        self._table.hear(event)
        if self._table.is_due(time.monotonic()) and (row := self._table.row()):
            self._pass_on(row)

    def output(self, name: str, line: str) -> None:
        """Do nothing: loggers get figures only."""

    def end(self, state: str, record: Mapping[str, Any] | None, error: str) -> None:
        """Pass on the last row and the test figures, and wait until the loggers have stored everything."""
        if last := self._table.row():
            self._pass_on(last)
        for row in self._table.tested((record or {}).get("curve") or ()):
            self._pass_on(row)
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.call("finish", state)
        for thread in self._threads:
            thread.end(deadline)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        for thread in self._threads:
            thread.end(deadline=0.0)

    def _pass_on(self, row: Row) -> None:
        for thread in self._threads:
            thread.row(row)


class LoggerThread:
    """Calls a logger in order, from its own thread. After an exception it warns once and calls no more."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._name = type(logger).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"logger {self._name}", daemon=True)
        self._thread.start()

    def call(self, method: str, *args: Any) -> None:
        """Have a method called, after those before it. Waits if too many do."""
        self._put(partial(getattr(self._logger, method), *args))

    def row(self, row: Row) -> None:
        """Have a row logged, or drop it if the logger is too far behind. Never waits."""
        log = partial(self._logger.log, row.figures, step=row.step, samples=row.samples, seconds=row.seconds)
        try:
            self._calls.put_nowait(log)
        except queue.Full:
            self._dropped += 1

    def end(self, deadline: float) -> None:
        """Wait for the calls so far, until `deadline` of the monotonic clock."""
        self._put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            LOG.warning(
                "logger %s has not finished after %g s; figures may be missing", self._name, FINISH_SECONDS
            )
        elif self._dropped and not self._has_failed:
            LOG.warning("logger %s was too slow: %d rows are missing", self._name, self._dropped)

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            self._calls.put(call, timeout=FINISH_SECONDS if self._thread.is_alive() else 0.0)
        except queue.Full:  # `end` says that it has not finished
            return

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._has_failed:
                self._try(call)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._has_failed = True
            LOG.warning("logger %s is left out from here on: %s: %s", self._name, type(error).__name__, error)
