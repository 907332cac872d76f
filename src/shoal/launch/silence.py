"""Silence: ends processes of a run that do not report any more, although they are there: frozen ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from shoal.launch.member import Member
from shoal.launch.stop_signals import StopSignal

ASLEEP_SECONDS = 5.0
"""A launcher that has not looked for so long was stopped itself: that is not the fault of its processes."""

STOPPING_SECONDS = 10.0
"""How long a process may be silent once the run is to stop. A node reports every second, whatever it does."""

LOG = logging.getLogger("shoal")


class Silence:
    """Watches members from their first report on. The first step may take long, and nobody reports before."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._looked_at = time.monotonic()

    def end_frozen(self, members: Sequence[Member], stopped_by: int) -> None:
        """Kill members that have been silent for too long.

        One would hold up a run that a signal has stopped; that ends at once, with StopSignal.
        """
        limit = min(self._patience, STOPPING_SECONDS) if stopped_by else self._patience
        for m, seconds in self._silent(members, limit):
            if stopped_by:
                LOG.warning("%s gave no sign of life for %.0f s; nothing more is saved", m.name, seconds)
                raise StopSignal(stopped_by)
            m.why_lost = f"was killed after {seconds:.0f} s without a sign of life"
            m.process.kill()

    def _silent(self, members: Sequence[Member], limit: float) -> Iterator[tuple[Member, float]]:
        now = time.monotonic()
        asleep = now - self._looked_at
        self._looked_at = now
        for m in members:
            if m.first_progress is None or m.ended or m.report or m.failure:
                continue
            if asleep > ASLEEP_SECONDS:
                m.heard_at += asleep
            if (seconds := now - m.heard_at) > limit:
                m.heard_at = now  # its end may take a moment
                yield m, seconds
