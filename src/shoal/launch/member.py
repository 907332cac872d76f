"""Member: one process of a run, as its launcher sees it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from shoal.launch.process_handle import ProcessHandle

UNNEEDED = {"needed": False}
"""The report of a keeper in a run whose workers do not come and go after all."""


@dataclass
class Member:
    """One node's process, with the launcher's end of its control connection."""

    rank: int
    name: str
    process: ProcessHandle
    connection: Connection
    incarnation: int = 0
    ready: bool = False
    paused_at: int | None = None
    is_idle: bool = False  # its own share is done; it takes over batches of others, or waits for their end
    progress: dict[str, Any] = field(default_factory=dict)  # its last progress event
    report: dict[str, Any] | None = None  # its report, once it is done
    failure: dict[str, Any] | None = None
    ended: bool = False
    first_progress: tuple[float, int] | None = None  # when, and at which step
    heard_at: float = 0.0  # when it last reported
    awaits_host: bool = False  # its host is lost, and it is started when that answers again
    false_starts: int = 0  # of its predecessors, in a row: killed before they were ready
    why_lost: str = ""  # how it ended if its exit code does not tell, as when its host is lost

    def note_progress(self, said: dict[str, Any]) -> None:
        """Take in a progress event."""
        self.progress = said
        self.heard_at = time.monotonic()
        if self.first_progress is None:
            self.first_progress = (time.monotonic(), said.get("step", 0))

    @property
    def is_needed(self) -> bool:
        """Whether it has not said that nobody needs it."""
        return self.report != UNNEEDED

    @property
    def step_seconds(self) -> float:
        """Seconds a step, on average; 0 before the second progress event."""
        if self.first_progress is None:
            return 0.0
        began, step = self.first_progress
        done: int = self.progress.get("step", 0) - step
        return (time.monotonic() - began) / max(1, done)

    @property
    def undone(self) -> str:
        """What a worker had still to do, as far as its last report tells."""
        steps, done = self.progress.get("steps"), self.progress.get("step", 0)
        return "its remaining steps" if steps is None or steps == done else f"its last {steps - done} steps"


def order(member: Member, what: dict[str, Any]) -> None:
    """Send an order to a member. If its process is gone, the launcher finds out elsewhere."""
    with suppress(OSError):
        member.connection.send_bytes(json.dumps(what).encode())
