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
        elif kind == "progress":
            self._progress[rank] = {**event, "rank": rank, "role": "worker"}
            self._tell(rank, seconds)
        elif isinstance(event.get("report"), dict):
            self.reports[rank] = {**event["report"], "rank": rank, "role": "worker"}

    def reports_like(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports that have all that this one of a worker has, by rank."""
        return [
            self.reports[rank] for rank in sorted(self.reports) if one.keys() <= self.reports[rank].keys()
        ]

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
