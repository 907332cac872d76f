"""Visitors: the workers that joined a run from elsewhere, as its launcher hears of them from the keeper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from shoal.launch.open_places import CAME, GONE

LOG = logging.getLogger("shoal")

LAST_SECONDS = 10.0
"""How long a launcher waits, when its own processes are done, for the reports of workers from elsewhere."""

NOTHING_YET = {"role": "worker", "step": 0, "steps": None, "loss": float("nan")}


class Visitors:
    """Who is there, and the `reports` of those who stayed to the end, by rank.

    `on_progress` gets their progress events.
    """

    def __init__(self, on_progress: Callable[[dict[str, Any]], None]) -> None:
        self.reports: dict[int, dict[str, Any]] = {}
        self.present: set[int] = set()
        self._on_progress = on_progress
        self._progress: dict[int, dict[str, Any]] = {}

    def hear(self, rank: int, event: dict[str, Any], seconds: float) -> None:
        """Take in an event of the place of that rank, so many seconds after the start of the run."""
        kind = event.pop("event")
        if kind == CAME:
            self._come(rank, event["from"], seconds)
        elif kind == GONE:
            self._go(rank, seconds)
        elif kind == "progress" and _is_progress(event):
            self._progress[rank] = {**event, "rank": rank, "role": "worker"}
            self._tell(rank, seconds)
        elif kind == "done" and isinstance(event.get("report"), dict):
            self.reports[rank] = {**event["report"], "rank": rank, "role": "worker"}
        else:
            LOG.warning("worker %d has sent what is no %s of a worker; it is ignored", rank, kind)

    def reports_like(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports that have all that this one of a worker has, in the same types, by rank."""
        return [self.reports[rank] for rank in sorted(self.reports) if _is_like(self.reports[rank], one)]

    def _come(self, rank: int, caller: str, seconds: float) -> None:
        where = unquote(caller).partition(":")[2].rpartition(":")[0] or "this host"
        LOG.warning("worker %d joins from %s", rank, where)
        self.present.add(rank)
        self._tell(rank, seconds, state="joining")

    def _go(self, rank: int, seconds: float) -> None:
        self.present.discard(rank)
        if rank not in self.reports:
            LOG.warning("worker %d has left; its place is open", rank)
            self._tell(rank, seconds, lost=True, state="dead", fault=f"worker {rank} has left")

    def _tell(self, rank: int, seconds: float, **news: Any) -> None:
        last = self._progress.get(rank, {})
        self._on_progress({**NOTHING_YET, "rank": rank, **last, "seconds": seconds, **news})


def _is_progress(event: dict[str, Any]) -> bool:
    """Whether an event from elsewhere is one that can be shown: numbers where people look at numbers."""
    if not isinstance(event.get("step"), int):
        return False
    words = {name: event.get(name) for name in ("state", "awaits", "fault", "role", "event")}
    numbers = {name: value for name, value in event.items() if name not in words}
    return all(value is None or isinstance(value, str) for value in words.values()) and all(
        value is None or isinstance(value, (int, float)) for value in numbers.values()
    )


def _is_like(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a report from elsewhere has all that one of ours has, numbers where that has numbers."""
    return all(name in one and _has_form(one[name], other[name]) for name in other)


def _has_form(one: Any, other: Any) -> bool:
    if isinstance(other, dict):  # numbers by name; the names differ
        return isinstance(one, dict) and all(isinstance(value, (int, float)) for value in one.values())
    if isinstance(other, (int, float)) or other is None:
        return one is None or isinstance(one, (int, float))
    return type(one) is type(other)
