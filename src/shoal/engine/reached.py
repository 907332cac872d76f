"""Reached: how far each worker is, as a server knows it, and where one that was started again goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from shoal.core.transport import Message
from shoal.engine.protocol import BatchesRead, Joined, Lost, Push

MOST_FUTILE = 3
"""How often in a row a worker may be lost before it has pushed anything, and still be awaited."""


UNKNOWN = -1
"""In the place of the batches that a loop has read, if it has left a pass before its end."""


class Reached:
    """The clock of each worker at its last push or report, and the batches that its loop had read by then.

    These are as many as the clock says, where a step takes one batch.
    """

    def __init__(self, workers: int, now: Callable[[], float]) -> None:
        self.awaits_seconds = 0.0  # for how long a lost worker's batches are left for its successor
        self.undone: list[int] = []  # in the end: workers that were lost, and nobody has done their batches
        self._finished: set[int] = set()
        self.pushed: dict[int, int] = {}  # worker -> its clock at its last push
        self._in_model: dict[int, tuple[int, int]] = {}  # worker -> clock and batches of what is in the model
        self._read: dict[int, int] = {}  # worker -> batches behind its next push, where it said so
        self._workers, self._now = workers, now
        self._awaited: dict[int, float] = {}  # lost workers, not back yet -> since when
        self._futile: Counter[int] = Counter()  # worker -> losses since its last push

    def hear(self, m: Message) -> None:
        """A message has come: of batches that a loop has read, or else a sign that its sender is there."""
        if isinstance(m, BatchesRead):
            self._read[m.src] = m.seq  # those of its next push are among them
        if not isinstance(m, (Lost, Joined)):
            self._awaited.pop(m.src, None)

    def note(self, m: Message) -> None:
        """A push, or a report of what needs none, is in the model."""
        if isinstance(m, Push):
            self.pushed[m.src] = m.clock
        self._in_model[m.src] = m.clock, self._read.get(m.src, m.clock)
        self._futile.pop(m.src, None)

    def lose(self, rank: int) -> None:
        """A peer is lost; what a worker had read and not pushed, its successor reads again."""
        self._read.pop(rank, None)
        self._futile[rank] += 1
        if rank < self._workers and self._futile[rank] <= MOST_FUTILE:
            self._awaited.setdefault(rank, self._now())

    def clock(self, rank: int) -> int:
        """How far a worker is in the model."""
        return self._in_model.get(rank, (0, 0))[0]

    def where(self, rank: int) -> tuple[int, int]:
        """The clock at which the successor of a worker goes on, and the batches that it skips.

        These are UNKNOWN where only their number is known, and not which: then it cannot go on, and leaves.
        """
        clock, batches = self._in_model.get(rank, (0, 0))
        if batches == UNKNOWN:
            self._futile[rank] = MOST_FUTILE
        return clock, batches

    @property
    def awaits_any(self) -> bool:
        """Whether there is a lost worker to wait for."""
        return any(self._now() < since + self.awaits_seconds for since in self._awaited.values())

    def end(self, finished: Iterable[int]) -> None:
        """All is done that is waited for, and these have come to their end; others may still do so."""
        self._finished.update(finished)
        self.undone = sorted(set(range(self._workers)) - self._finished)

    def start_over(self) -> None:
        """All workers resume from a checkpoint."""
        self._awaited.clear()
        self._read.clear()
        self._finished.clear()

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "awaited": sorted(self._awaited),
            "pushed": {str(rank): clock for rank, clock in self.pushed.items()},
            "in_model": {str(rank): list(place) for rank, place in self._in_model.items()},
            "read": {str(rank): batches for rank, batches in self._read.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.pushed = {int(rank): clock for rank, clock in state["pushed"].items()}
        self._awaited = dict.fromkeys(state.get("awaited", ()), self._now())
        as_pushed = {rank: (clock, clock) for rank, clock in state["pushed"].items()}  # older checkpoints
        in_model, read = state.get("in_model", as_pushed), state.get("read", {})
        self._in_model = {int(rank): (clock, batches) for rank, (clock, batches) in in_model.items()}
        self._read = {int(rank): batches for rank, batches in read.items()}
