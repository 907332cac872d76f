"""Runs that are on disk: their state, their figures, and which of them a name means."""

from __future__ import annotations

import fcntl
import json
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.records.places import ABOUT, EVENTS, RESULT, existing_folder

LAST = "last"


@dataclass(frozen=True)
class StoredRun:
    """The folder of a run, under way or ended. `about` is its run.json."""

    path: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the folder, which you may change."""
        return self.path.name

    @property
    def state(self) -> str:
        """running, done, failed or interrupted; killed if the launcher is gone and could not say so.

        running? if that cannot be told from here, unreadable if run.json is damaged.
        """
        state = str(self.about.get("state", "unreadable"))
        if state != "running":
            return state
        if self.about.get("locked") and is_locked(self.path / EVENTS):
            return state
        here = self.about.get("locked") and self.about.get("host") == socket.gethostname()
        return "killed" if here else "running?"

    @property
    def started(self) -> datetime:
        """When the run began."""
        try:
            return datetime.fromisoformat(self.about["started"]).astimezone()
        except (KeyError, TypeError, ValueError):
            return datetime.fromtimestamp(self.path.stat().st_mtime).astimezone()

    def figure(self, name: str) -> Any:
        """A figure of the result, or None. The seconds of a run without a result are those it has lived."""
        figures = self.about.get("figures") or {}
        if name != "seconds" or figures:
            return figures.get(name)
        if "wall_seconds" in self.about:
            return self.about["wall_seconds"]
        events = self.path / EVENTS
        if not events.exists():
            return None
        end = events.stat().st_mtime if self.state == "killed" else time.time()
        return max(0.0, end - self.started.timestamp())

    def score(self, name: str) -> Any:
        """A test figure at the end, as the closing table has it: the mean of the last evaluations."""
        mean = ((self.about.get("final") or {}).get(name) or {}).get("mean")
        return self.figure(name) if mean is None else mean

    def records(self) -> list[dict[str, Any]]:
        """The figures in full, as `--json` writes them; empty if there is no result."""
        result = self.path / RESULT
        return read_records(result) if result.exists() else []


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock on a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_run(path: Path) -> StoredRun:
    """The run in a folder that has a run.json."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}
    return StoredRun(path, about if isinstance(about, dict) else {})


def read_runs(folder: Path) -> list[StoredRun]:
    """All runs of a folder, newest first."""
    runs = [read_run(path.parent) for path in folder.glob(f"*/{ABOUT}")]
    return sorted(runs, key=lambda run: (run.started, run.path.stat().st_ctime_ns), reverse=True)


def find_runs(word: str, given: str | None = None) -> list[StoredRun]:
    """The runs that a word means: a run's own folder, a name or the beginning of one, or `last`.

    `last` are all runs of the last command. `given` is the folder of runs, by default the usual one. Raises
    ValueError if there is no such run, or if the word could mean several.
    """
    if (Path(word) / ABOUT).is_file():
        return [read_run(Path(word))]
    folder = existing_folder(given)
    runs = read_runs(folder)
    if not runs:
        raise ValueError(f"there is no run in {folder}")
    if word == LAST:
        first = runs[0].about.get("first", runs[0].name)
        return [run for run in reversed(runs) if run.about.get("first", run.name) == first]
    return [_only(word, runs, folder)]


def _only(word: str, runs: Iterable[StoredRun], folder: Path) -> StoredRun:
    by_name = {run.name: run for run in runs}
    found = [word] if word in by_name else [name for name in by_name if name.startswith(word)]
    if not found:
        found = [name for name in by_name if word in name]
    if not found:
        newest = ", ".join(list(by_name)[:5])
        raise ValueError(f"no run in {folder} is called {word!r}. The newest: {newest}")
    if len(found) > 1:
        raise ValueError(
            f"{word!r} could be {', '.join(found[:5])}{' …' * (len(found) > 5)}; name more of it"
        )
    return by_name[found[0]]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The runs in a file that `--json` wrote. Raises ValueError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        runs = found["runs"]
        if not all(isinstance(run, dict) and "strategy" in run for run in runs):
            raise TypeError("no runs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no runs as --json writes them"
        raise ValueError(f"cannot read {path}: {why}") from None
    return list(runs)
