"""JointStop: brings all workers of a run to the same step and stops them there, so that all can save it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shoal.launch.member import Member, order

LOG = logging.getLogger("shoal")

NUDGE_SECONDS = 0.3
"""How long paused workers wait for the others before they run on to a later step, and at least STEPS_WAITED
steps of the slowest: it may just be in a long one."""

STEPS_WAITED = 2.0

PATIENCE = 1.5
"""The factor by which that wait grows each time, unless the strategy keeps all workers in step.

A worker that has not paused may just be in a long step.
"""

WORD_SECONDS = 5.0
"""How long a stop may take before a warning names the nodes that still run."""


class JointStop:
    """A stop under way. `members` has the `workers` first; a crew may put successors into it meanwhile.

    A worker pauses when the order reaches it. Another may have begun the next step before, and may now wait
    for the paused one. So until all have paused, the paused ones run on, further each time. In a `loose` run
    workers are not kept in step.
    """

    def __init__(self, members: Sequence[Member], workers: int, loose: bool) -> None:
        """Order all to stop. Servers end when every worker has left; the order tells them that it will."""
        self._members, self._workers, self._loose = members, workers, loose
        self._told_at = time.monotonic()
        self._said_a_word = False
        self._meeting_step, self._stride = 0, 1
        slowest = max(m.step_seconds for m in members[:workers])
        self._nudge_seconds = max(NUDGE_SECONDS, STEPS_WAITED * slowest)
        self._next_nudge = self._told_at + self._nudge_seconds
        for m in members:
            if m.ready and not m.ended:  # one that comes back waits for another order first
                order(m, {"order": "stop"})

    def go_on(self) -> None:
        """Do what is due: again and again, until all have ended."""
        workers = self._members[: self._workers]
        active = [m for m in workers if not (m.ended or m.report or m.is_idle or m.awaits_host)]
        paused = {m.rank: m.paused_at for m in active if m.paused_at is not None}
        self._say_who_is_late()
        if not paused:
            return
        if len(paused) < len(active) and time.monotonic() > self._next_nudge:
            self._nudge(max(paused.values()))
        for m in active:
            if m.paused_at is not None and m.paused_at < self._meeting_step:
                _send_on(m, self._meeting_step, final=False)
        if all(m.paused_at is not None for m in active):
            # a finished worker is past every step of the others: too late for a checkpoint of all
            finished = any(m.report or m.is_idle for m in workers)
            step = None if finished else max(paused.values())
            for m in active:
                _send_on(m, step, final=True)

    def _nudge(self, furthest: int) -> None:
        self._meeting_step = max(self._meeting_step, furthest) + self._stride
        self._stride *= 2
        self._next_nudge = time.monotonic() + self._nudge_seconds
        if self._loose:
            self._nudge_seconds *= PATIENCE

    def _say_who_is_late(self) -> None:
        if self._said_a_word or time.monotonic() < self._told_at + WORD_SECONDS:
            return
        self._said_a_word = True
        late = ", ".join(m.name for m in self._members if not (m.ended or m.report))
        if late:
            LOG.warning("stopping: still waiting for %s; press Ctrl-C again to end everything at once", late)


def _send_on(member: Member, step: int | None, *, final: bool) -> None:
    member.paused_at = None
    order(member, {"order": "run to", "step": step, "final": final})
