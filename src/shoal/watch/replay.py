"""Replay: a run that is kept in a folder, ended or under way, as the frames of a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.records.places import EVENTS, LOG
from shoal.records.stored_runs import StoredRun, read_run
from shoal.report.reading import Record, baseline_of
from shoal.report.units import finite
from shoal.report.verdicts import verdict
from shoal.watch.feed import MOST_LINES, Feed
from shoal.watch.timeline import MOST_FRAMES, Timeline


class Replay:
    """Reads a run's folder into a feed: all that is there, then what is added while the run is under way.

    `others` are the records of the runs before it, to compare it with.
    """

    def __init__(self, stored: StoredRun, feed: Feed, others: list[Record] | None = None) -> None:
        self._path = stored.path
        self._feed = feed
        self._records: list[Record] = [] if others is None else others
        self._events = _NewLines(stored.path / EVENTS)
        self._log = _NewLines(stored.path / LOG)
        about = stored.about
        config = about.get("config") or {}
        task, strategy = about.get("task") or "", str(about.get("strategy") or stored.name)
        virtual = config.get("transport") == "sim"
        asked = {"task": task, "transport": "sim" if virtual else None}
        single = baseline_of(asked, self._records)
        self.run = Timeline(
            f"{strategy} on {task}" if task else strategy,
            int(about.get("workers") or 1),
            int(about.get("servers") or 0),
            virtual,
            facts=" · ".join(str(fact) for fact in (config.get("transport"), stored.name) if fact),
            baseline=None if single is None else finite(single.get("samples_per_second")),
        )

    def load(self) -> None:
        """Take in what is there, and show it."""
        events = list(self._read_events())
        end = max((finite(e.get("seconds")) or finite(e.get("time")) or 0.0 for e in events), default=0.0)
        due = 0.0
        for event in events:
            self.run.add(event)
            if self.run.seconds >= due:
                self.run.keep(self.run.frame())
                due = self.run.seconds + end / MOST_FRAMES
        if events:
            self.run.keep(self.run.frame())
        self._feed.start(self.run)
        self._print_new_lines()
        self._end_if_over()

    def follow(self) -> bool:
        """Take in what was added; whether the run is still under way."""
        for event in self._read_events():
            self._feed.add(event)
        self._print_new_lines()
        self._end_if_over()
        return not self.run.is_over

    def _read_events(self) -> Iterator[dict[str, Any]]:
        nodes = self.run.workers + self.run.servers
        for line in self._events.read():
            try:
                event = json.loads(line)
            except ValueError:  # a line that a full disk cut off
                continue
            if isinstance(event, dict) and isinstance(event.get("rank"), int) and event["rank"] < nodes:
                yield event

    def _print_new_lines(self) -> None:
        for line in list(self._log.read())[-MOST_LINES:]:
            name, _, text = line.partition(" | ")
            self._feed.print(name, text)

    def _end_if_over(self) -> None:
        stored = read_run(self._path)
        if stored.state in ("running", "running?") or self.run.is_over:
            return
        records = stored.records()
        record: Record = records[0] if records else {}
        self._records += [record] * bool(record)
        told = verdict(record, baseline_of(record, self._records)) if record else ""
        why = stored.about.get("error")
        self._feed.finish(f"{stored.state}: {why}" if why else stored.state, told, record.get("curve") or ())


class _NewLines:
    """The whole lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._position:  # it was written anew
                    self._position = 0
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        yield from whole.decode("utf-8", "replace").splitlines()
