"""RunFolder: the files of one run, written while it runs so that others can read along.

run.json      what was asked for, the state, and at the end the main figures
events.jsonl  progress events, one a line, each with "time": seconds since the start
log.txt       output of the workers and warnings, each line with its node's name
result.json   the figures as `--json` writes them, once there is a result
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.records.places import ABOUT, EVENTS, LOG, RESULT
from shoal.records.thinning import BoundedLog, EventThinning
from shoal.report.files import plain, write_json, write_whole

SUMMARY = (
    "test_accuracy",
    "test_loss",
    "seconds",
    "samples",
    "samples_per_second",
    "bytes_sent",
    "wait_fraction",
)
"""Figures of the result that run.json repeats, so that a list of runs opens one small file for each."""


class RunFolder:
    """The folder of a run that is under way; the folder itself must exist. An observer of a recording.

    While the launcher lives it holds a lock on events.jsonl, which the kernel releases however it dies. So
    readers can tell a run that is under way from one whose launcher was killed.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], nodes: int) -> None:
        self.path = path
        self._began = time.monotonic()
        self._thinning = EventThinning(nodes)
        self._events = (path / EVENTS).open("a", encoding="utf-8", buffering=1)  # a reader sees whole lines
        self._log = BoundedLog(path / LOG)
        self._log_lock = threading.Lock()
        self._about: dict[str, Any] = {
            "name": path.name,
            "state": "running",
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "locked": self._lock(),
            **about,
        }
        self._write_about()

    def event(self, event: Mapping[str, Any]) -> None:
        """Append a progress event, unless the thinning leaves it out."""
        now = time.monotonic() - self._began
        if self._thinning.keeps(event, now):
            line = json.dumps(plain({"time": round(now, 3), **event}), allow_nan=False)
            self._events.write(f"{line}\n")

    def output(self, name: str, line: str) -> None:
        """Append a line that a node printed. May be called from any thread."""
        with self._log_lock:
            self._log.write(f"{name} | {line}")

    def end(self, state: str, record: Mapping[str, Any] | None, error: str) -> None:
        """Write the result, if there is one, and the state in which the run ended."""
        if error:
            for line in error.splitlines():
                self.output("shoal", line)
        if record is not None:
            write_json([record], self.path / RESULT)
            self._about["figures"] = {name: record.get(name) for name in SUMMARY}
            self._about["final"] = record.get("final")
        self._about |= {
            "state": state,
            "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
            "wall_seconds": round(time.monotonic() - self._began, 3),
            **({"error": error.splitlines()[-1]} if error else {}),
        }
        self._write_about()  # before the lock goes: a reader never sees a finished run as killed
        self.close()

    def close(self) -> None:
        """Close the files, which releases the lock."""
        self._events.close()
        self._log.close()

    def _lock(self) -> bool:
        """Lock the events for the life of this process; False on a file system that has no locks."""
        try:
            fcntl.flock(self._events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _write_about(self) -> None:
        text = json.dumps(plain(self._about), indent=1, allow_nan=False)
        write_whole(self.path / ABOUT, text + "\n")
