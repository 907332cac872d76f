"""LivePage: what a command tells while it runs, on a page of its own."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from shoal.report.reading import Record, baseline_of
from shoal.report.units import finite
from shoal.report.verdicts import verdict
from shoal.watch.feed import Feed
from shoal.watch.page_server import PageServer
from shoal.watch.timeline import Timeline


class LivePage:
    """Serves the page from construction to `close`; use it as a context manager.

    It is told of a run as a progress display is: `start`, an `update` for every event, and `finish` with the
    run's record. Several runs may follow one another; the page compares them.
    """

    def __init__(self, port: int = 0) -> None:
        self._feed = Feed()
        self._server = PageServer(self._feed, port)
        self._feed.run()
        self._records: list[Record] = []

    @property
    def address(self) -> str:
        """Where to point a browser on this host."""
        return self._server.address

    def told(self) -> str:
        """The address, and the command that opens the page on another machine."""
        there = f"{getpass.getuser()}@{socket.gethostname()}:{self._server.port}/{self._server.token}"
        return f"watch: {self.address}\n       from another machine: shoal watch {there}"

    def start(
        self,
        name: str,
        workers: int,
        servers: int = 0,
        *,
        virtual: bool = False,
        facts: str = "",
        task: str | None = None,
    ) -> None:
        """Begin a run, and end the one before."""
        asked = {"task": task, "transport": "sim" if virtual else None, "strategy": name}
        single = baseline_of(asked, self._records)
        baseline = None if single is None else finite(single.get("samples_per_second"))
        self._feed.start(Timeline(name, workers, servers, virtual, facts, baseline))

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in a progress event."""
        self._feed.add(dict(event))

    def print(self, name: str, line: str) -> None:
        """Take in a line of a worker's output."""
        self._feed.print(name, line)

    def finish(self, record: Record) -> None:
        """The run is done, and this is its record."""
        self._records.append(record)
        told = verdict(record, baseline_of(record, self._records))
        self._feed.finish("done", told, record.get("curve") or ())

    def __enter__(self) -> LivePage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._feed.finish(f"ended: {error}" if str(error) else "ended")
        self.close()

    def close(self) -> None:
        """Let the browsers have the last state, and stop serving; they keep showing it."""
        self._feed.close()
        self._server.close()
