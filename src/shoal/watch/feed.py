"""Feed: the runs that a page shows, and the browsers that follow them.

A browser gets everything so far, then each change as a server-sent event. A change is encoded once for all
browsers, and not at all while there are none.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from shoal.report.files import plain
from shoal.watch.timeline import Timeline

FRAME_SECONDS = 0.5
MOST_LINES = 300  # of the workers' output
LONGEST_LINE = 500  # characters
MOST_UNREAD = 200  # changes that wait for a browser before it is given up
MOST_BROWSERS = 16


class Subscriber:
    """One browser's changes, in order. None is the end."""

    def __init__(self, first: bytes) -> None:
        self._changes: queue.Queue[bytes | None] = queue.Queue(MOST_UNREAD)
        self.first = first
        self.is_slow = False

    def put(self, change: bytes | None) -> None:
        """Add a change; a browser that does not read them gets no more."""
        try:
            self._changes.put_nowait(change)
        except queue.Full:
            self.is_slow = True

    def next(self, seconds: float) -> bytes | None:
        """The next change, waiting for it. Raises queue.Empty after so many seconds."""
        return self._changes.get(timeout=seconds)

    @property
    def has_read_all(self) -> bool:
        """Whether nothing waits."""
        return self._changes.empty()


class Feed:
    """Collects what happens and passes it on twice a second; safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: list[Timeline] = []
        self._lines: deque[list[str]] = deque(maxlen=MOST_LINES)
        self._new_lines: list[list[str]] = []
        self._subscribers: list[Subscriber] = []
        self._changed = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what happens --------------------------------------------------------------------------

    def start(self, run: Timeline) -> None:
        """Begin another run."""
        with self._lock:
            self._runs.append(run)
            self._send("run", {"index": len(self._runs) - 1, **run.head(), "frames": run.frames})
            self._changed = True

    def add(self, event: dict[str, Any]) -> None:
        """Take in a progress event of the run that began last."""
        with self._lock:
            if self._runs:
                self._runs[-1].add(event, self._clock())
                self._changed = True

    def print(self, name: str, line: str) -> None:
        """Take in a line of a worker's output."""
        with self._lock:
            said = [name, line[:LONGEST_LINE]]
            self._lines.append(said)
            self._new_lines.append(said)
            del self._new_lines[:-MOST_LINES]

    def finish(self, how: str, verdict: str = "", points: Any = ()) -> None:
        """The run that began last has ended."""
        with self._lock:
            if self._runs and not self._runs[-1].is_over:
                self._runs[-1].finish(how, verdict, points)
                self._changed = True
        self.tick()

    def tick(self) -> None:
        """Make a frame of what has changed and pass it on."""
        with self._lock:
            self._send_new_lines()
            if not self._changed or not self._runs:
                return
            run = self._runs[-1]
            now = None if run.virtual or run.is_over else self._clock()
            frame = run.frame(now)
            run.keep(frame)
            self._changed = not run.is_over and not run.virtual and run.seconds > 0  # silence is news, too
            self._send("frame", {"index": len(self._runs) - 1, **run.head(), "frame": frame})

    # -- browsers ------------------------------------------------------------------------------

    def subscribe(self) -> Subscriber | None:
        """A new browser: all so far, then the changes. None if there are too many."""
        with self._lock:
            if len(self._subscribers) >= MOST_BROWSERS or self._over.is_set():
                return None
            runs = [{**run.head(), "frames": list(run.frames)} for run in self._runs]
            self._send_new_lines()  # to the others; this browser would get them twice
            lines = list(self._lines)
            subscriber = Subscriber(b"")
            self._subscribers.append(subscriber)
        subscriber.first = encode("all", {"runs": runs, "lines": lines})  # not under the lock: it may be long
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """The browser has gone."""
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    @property
    def browsers(self) -> int:
        """How many follow."""
        with self._lock:
            return len(self._subscribers)

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Pass changes on from a thread, until `close`."""
        self._thread = threading.Thread(target=self._pump, name="watch", daemon=True)
        self._thread.start()

    def close(self, grace_seconds: float = 2.0) -> None:
        """Pass on the last change, and wait until the browsers have it."""
        self.tick()
        self._over.set()
        with self._lock:
            followers = list(self._subscribers)
            for subscriber in followers:
                subscriber.put(None)
        deadline = monotonic() + grace_seconds
        while any(not s.has_read_all for s in followers) and monotonic() < deadline:
            threading.Event().wait(0.01)
        if self._thread is not None:
            self._thread.join()

    def _pump(self) -> None:
        while not self._over.wait(FRAME_SECONDS):
            self.tick()

    def _send_new_lines(self) -> None:
        if self._new_lines:
            self._send("lines", self._new_lines)
            self._new_lines = []

    def _send(self, event: str, value: Any) -> None:
        if not self._subscribers:
            return
        change = encode(event, value)
        for subscriber in self._subscribers:
            subscriber.put(change)


def encode(event: str, value: Any) -> bytes:
    """A server-sent event. Its data is one line of JSON."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a loss that is not finite, in a field that somebody added
        text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n".encode()
