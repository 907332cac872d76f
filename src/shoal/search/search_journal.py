"""SearchJournal: every decision of a search and every score, one JSON object a line, synced before it counts.

Replaying it to a fresh searcher gives the same state, so it is all that a search needs to be resumed. A line
that is not whole at the very end was never synced, and is cut off; anywhere else it is damage, and an error.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from shoal.core.errors import CheckpointError
from shoal.search.search_folder import JOURNAL
from shoal.storage.whole_files import sync_folder

Event = dict[str, Any]


class SearchJournal:
    """The journal in a folder, locked against a second search for as long as it is open."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CheckpointError(f"another search is running in {folder}; name another folder") from None
        except OSError:  # a file system without locks
            pass
        try:
            self.events, whole = read_events(self.path)
        except CheckpointError:
            self._file.close()
            raise
        os.ftruncate(self._file.fileno(), whole)
        sync_folder(folder)

    def append(self, event: Event) -> None:
        """Write an event down; it would survive a crash of this host when this returns."""
        self._file.write(json.dumps(event, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.events.append(event)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def __enter__(self) -> SearchJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> tuple[list[Event], int]:
    """The events in a journal, and the bytes up to the end of the last whole line."""
    content = path.read_bytes()
    events: list[Event] = []
    whole = 0
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("torn")
            events.append(json.loads(line))
        except ValueError:
            if whole + len(line) < len(content):
                raise CheckpointError(
                    f"line {number} of {path} is damaged; the search cannot be resumed"
                ) from None
            break
        whole += len(line)
    return events, whole
