"""RunRecording: one run and its observers, which see every event and cannot end it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, ParamSpec, Protocol

from shoal.core.errors import Interrupted, WorkerFailed
from shoal.loggers.logger import Logger
from shoal.loggers.sending import LoggedRun
from shoal.records.run_store import RunDescription, RunStore

P = ParamSpec("P")

WARNINGS = logging.getLogger("shoal")


class Observer(Protocol):
    """A place that is told what happens in a run."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take a progress event of a node."""
        ...

    def output(self, name: str, line: str) -> None:
        """Take a line that a node printed, or a warning. Called from any thread."""
        ...

    def end(self, state: str, record: Mapping[str, Any] | None, error: str) -> None:
        """Take the result, or why there is none. `state` is "done", "failed" or "interrupted"."""
        ...

    def close(self) -> None:
        """Release everything. Called after an error, instead of `end`."""
        ...


class RunRecording:
    """Passes what happens in a run to its observers; a context manager around the run.

    An observer that raises is left out from there on, with one warning: a full disk ends no training.
    """

    def __init__(self, observers: Mapping[str, Observer]) -> None:
        self._observers = dict(observers)
        self._record: Mapping[str, Any] | None = None

    def __enter__(self) -> RunRecording:
        WARNINGS.addFilter(self._overhear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tell(lambda observer: observer.end(*self._outcome(error)))
        finally:
            WARNINGS.removeFilter(self._overhear)

    def event(self, event: Mapping[str, Any]) -> None:
        """Pass on a progress event."""
        self._tell(lambda observer: observer.event(event))

    def output(self, name: str, line: str) -> None:
        """Pass on a line that a node printed."""
        self._tell(lambda observer: observer.output(name, line))

    def done(self, record: Mapping[str, Any]) -> None:
        """Pass on the last progress of the nodes, and keep the result for the end."""
        for event in last_progress(record["nodes"]):
            self.event(event)
        self._record = record

    def _outcome(self, error: BaseException | None) -> tuple[str, Mapping[str, Any] | None, str]:
        if error is None:
            return "done", self._record, ""
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            return "interrupted", None, str(error) or "stopped by Ctrl-C"
        details = error.details if isinstance(error, WorkerFailed) else ""
        return "failed", None, f"{details.rstrip()}\n{str(error) or type(error).__name__}".lstrip("\n")

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for name, observer in list(self._observers.items()):
            try:
                call(observer)
            except Exception as error:
                if self._observers.pop(name, None) is not None:
                    with suppress(Exception):
                        observer.close()
                    WARNINGS.warning("%s is left out from here on: %s", name, error)

    def _overhear(self, warning: logging.LogRecord) -> bool:
        """Pass on a warning of this process. A filter, since a handler would keep it from the terminal."""
        self.output("shoal", warning.getMessage())
        return True


def record_run(run: RunDescription, store: RunStore | None, loggers: Sequence[Logger]) -> RunRecording:
    """The recording of a run: in a new folder of `store`, if there is one, and with these loggers."""
    observers: dict[str, Observer] = {}
    name = run.name()
    if store is not None:
        try:
            folder = store.open(run)
        except Exception as error:
            WARNINGS.warning("this run is not kept: %s", error)
        else:
            name = folder.path.name
            observers[f"the folder {folder.path}"] = folder
    if loggers:
        observers["logging"] = LoggedRun(loggers, name, run.config, run.workers, run.servers)
    return RunRecording(observers)


def both(first: Callable[P, None], second: Callable[P, None] | None) -> Callable[P, None]:
    """A function that passes its arguments to two, one after the other."""

    def call(*args: P.args, **options: P.kwargs) -> None:
        first(*args, **options)
        if second is not None:
            second(*args, **options)

    return call


def last_progress(nodes: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A last progress event of each node, from the nodes of a result."""
    for node in nodes:
        seconds = node["seconds"] or float("inf")
        steps = {"step": node["steps"], "steps": node["steps"]} if node["role"] == "worker" else {}
        pushes = sum(node["staleness"].values())
        behind = sum(int(late) * count for late, count in node["staleness"].items())
        yield {
            **node,
            **steps,
            "samples_per_second": (node["samples"] - node["samples_before"]) / seconds,
            "wait_fraction": node["wait_seconds"] / seconds,
            "saved_seconds": node["saved_seconds"] if node["coded_bytes"] else None,
            "staleness": behind / pushes if pushes else None,
            "compute_fraction": node["compute_seconds"] / seconds,
            "state": "done",
        }
