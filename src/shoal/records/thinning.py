"""What is kept of a long run: events ever further apart, and the beginning and end of the output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

EVENT_SECONDS = 0.5
EVENTS = 1500
"""Each node's events come this far apart, and after EVENTS of all nodes ever further.

The gap between two events of a node then grows with the time t as t * nodes / EVENTS. So ten times the time
adds 3,500 events, about a megabyte, whatever the number of nodes.
"""

MOST_LOG_BYTES = 2_000_000
KEPT_BYTES = 500_000  # of the beginning, and of the end
LONGEST_LINE = 10_000


class EventThinning:
    """Chooses the events to keep. News, such as a lost worker, are always kept."""

    def __init__(self, nodes: int) -> None:
        self._share = EVENTS / max(1, nodes)
        self._due: dict[int, float] = {}
        self._fields: dict[int, frozenset[str]] = {}

    def keeps(self, event: Mapping[str, Any], now: float) -> bool:
        """Whether to keep an event that comes `now`, in seconds since the start."""
        rank = event.get("rank")
        if not isinstance(rank, int):
            return True
        fields = frozenset(event)
        is_news = bool(
            fields - self._fields.setdefault(rank, fields)
        )  # progress has the same fields each time
        if not is_news and now < self._due.get(rank, 0.0):
            return False
        self._due[rank] = now + max(EVENT_SECONDS, now / self._share)
        return True


class BoundedLog:
    """A text file that keeps the beginning and the end of what is written, with a note between."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = self._open()
        self._bytes = 0
        self._head = 0  # bytes of the beginning, once lines were left out
        self._left_out = 0

    def write(self, line: str) -> None:
        """Append a line."""
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} … ({len(line) - LONGEST_LINE:,} characters are left out)"
        self._bytes += len(line.encode("utf-8", "replace")) + 1
        self._file.write(f"{line}\n")
        if self._bytes > MOST_LOG_BYTES:
            self._shorten()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8", errors="replace", buffering=1)

    def _shorten(self) -> None:
        """Write the file again without its middle, under a temporary name first."""
        self._file.close()
        text = self._path.read_bytes()
        if not self._head:
            self._head = text.rindex(b"\n", 0, KEPT_BYTES) + 1
        middle = text[self._head :]
        if self._left_out:
            middle = middle[middle.index(b"\n") + 1 :]  # the note of last time
        end = middle.index(b"\n", len(middle) - KEPT_BYTES) + 1
        self._left_out += middle.count(b"\n", 0, end)
        note = f"… {self._left_out:,} lines are left out …\n".encode()
        kept = text[: self._head] + note + middle[end:]
        temporary = self._path.with_suffix(".part")
        temporary.write_bytes(kept)
        temporary.replace(self._path)
        self._bytes = len(kept)
        self._file = self._open()
