"""Replay: a run that was recorded in a folder, finished or still under way, as the frames of a page.

run.json      what was asked for, and the state: running, done, failed or interrupted
events.jsonl  the progress events, one a line
log.txt       the output of the workers, each line with its node's name
result.json   the figures, once there are any
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.report.units import finite
from shoal.report.verdicts import verdict
from shoal.watch.feed import MOST_LINES, Feed
from shoal.watch.timeline import MOST_FRAMES, Timeline

ABOUT, EVENTS, LOG, RESULT = "run.json", "events.jsonl", "log.txt", "result.json"
MOST_FOLDERS = 3  # named in a message


def check_run(folder: Path) -> None:
    """Raise ValueError if the folder holds no run."""
    if (folder / ABOUT).is_file():
        return
    runs = sorted(path.parent.name for path in folder.glob(f"*/{ABOUT}"))[-MOST_FOLDERS:]
    if runs:
        raise ValueError(f"{folder} holds several runs; name one, such as {folder / runs[-1]}")
    what = f"{folder} holds no {ABOUT}" if folder.is_dir() else f"there is no folder {str(folder)!r}"
    raise ValueError(f"{what}; name the folder of a run, or HOST:PORT/TOKEN as a run with --watch prints it")


class Replay:
    """Reads a run's folder into a feed: all that is there, then what is added while the run is under way."""

    def __init__(self, folder: Path, feed: Feed) -> None:
        self._folder = folder
        self._feed = feed
        self._events = _NewLines(folder / EVENTS)
        self._log = _NewLines(folder / LOG)
        about = self._about()
        config = about.get("config") or {}
        task = about.get("task") or config.get("task") or ""
        strategy = about.get("strategy") or config.get("strategy") or "run"
        self.run = Timeline(
            f"{strategy} on {task}" if task else str(strategy),
            int(about.get("workers") or config.get("workers") or 1),
            int(about.get("servers") or 0),
            virtual=config.get("transport") == "sim",
            facts=" · ".join(str(fact) for fact in (config.get("transport"), about.get("name")) if fact),
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
        self._print(list(self._log.read())[-MOST_LINES:])
        self._end_if_over()

    def follow(self) -> bool:
        """Take in what was added; whether the run is still under way."""
        for event in self._read_events():
            self._feed.add(event)
        self._print(list(self._log.read())[-MOST_LINES:])
        self._end_if_over()
        return not self.run.is_over

    def _about(self) -> dict[str, Any]:
        about = json.loads((self._folder / ABOUT).read_text(encoding="utf-8"))
        return about if isinstance(about, dict) else {}

    def _read_events(self) -> Iterator[dict[str, Any]]:
        nodes = self.run.workers + self.run.servers
        for line in self._events.read():
            try:
                event = json.loads(line)
            except ValueError:  # a line that a full disk cut off
                continue
            if isinstance(event, dict) and isinstance(event.get("rank"), int) and event["rank"] < nodes:
                yield event

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            name, _, text = line.partition(" | ")
            self._feed.print(name, text)

    def _end_if_over(self) -> None:
        about = self._about()
        state = str(about.get("state") or "running")
        if state == "running" or self.run.is_over:
            return
        record, why = self._record(), about.get("error")
        how = f"{state}: {why}" if why else state
        told = verdict(record) if record else ""
        self._feed.finish(how, told, record.get("curve") or ())

    def _record(self) -> dict[str, Any]:
        try:
            runs = json.loads((self._folder / RESULT).read_text(encoding="utf-8"))["runs"]
        except (OSError, ValueError, KeyError):
            return {}
        return runs[0] if runs and isinstance(runs[0], dict) else {}


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
