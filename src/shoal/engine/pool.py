"""Pool: which batches are in the model, and which are free because their worker died."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Batch = tuple[int, int]
"""The share it is of, by the worker's rank, and its place in that share."""

Run = tuple[int, int, int]
"""Batches in a row: the share they are of, the place of the first, and the place after the last."""


class HandsOut(Protocol):
    """What the first server gives to workers that ask for more: a `Pool`, or an algorithm's own."""

    @property
    def has_free(self) -> bool:
        """Whether somebody who asks may be given something."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing is left to give, now or later."""
        ...

    def take(self, rank: int) -> tuple[Batch, int] | None:
        """What this worker is to do, and the clock at which it does it; None if there is nothing now."""
        ...

    def commit(self, rank: int, clock: int) -> None:
        """All that this worker did before that clock is in the model."""
        ...

    def give_up(self, rank: int) -> None:
        """The worker has gone."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...


@dataclass(slots=True)
class Lot:
    """What one worker has to do, in the order it does it: batches of its own share, then lent ones.

    `clock` counts the batches it has done; the one done at clock c is the (c - start)th of the lot.
    """

    rank: int
    own: int
    start: int = 0
    clock: int = 0
    lent: list[Batch] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The clock at which all is done."""
        return self.start + self.own + len(self.lent)

    @property
    def is_done(self) -> bool:
        """Whether all of it is in the model."""
        return self.clock >= self.end

    @property
    def rest(self) -> list[Run]:
        """What is not in the model."""
        done = self.clock - self.start
        own = [(self.rank, done, self.own)] if done < self.own else []
        return own + [(owner, place, place + 1) for owner, place in self.lent[max(0, done - self.own) :]]


class Pool:
    """Every worker has a share of `steps` batches; what it leaves undone goes to whoever asks for more."""

    def __init__(self, workers: int, steps: int) -> None:
        self._steps = steps
        self._lots = [Lot(rank, steps) for rank in range(workers)]
        self._free: deque[Run] = deque()
        self._unfinished = workers if steps else 0  # lots with batches left; counted, for there are many

    def begin_at(self, clocks: Sequence[int]) -> None:
        """The first batches of each worker are in the model: the run goes on from where others have left."""
        for lot, clock in zip(self._lots, clocks, strict=True):
            lot.clock = clock
        self._count_unfinished()

    def lengthen(self, steps: int) -> None:
        """The share of each worker has so many batches now."""
        self._steps = steps
        for lot in self._lots:
            lot.own = steps if lot.own else 0
        self._count_unfinished()

    @property
    def clocks(self) -> list[int]:
        """How many batches of each worker are in the model."""
        return [lot.clock for lot in self._lots]

    @property
    def shares(self) -> list[int]:
        """How many batches of its own share each worker was to do; 0 for one that came back."""
        return [lot.own for lot in self._lots]

    @property
    def rest(self) -> list[Run]:
        """All batches that are not in the model."""
        return [*self._free, *(run for lot in self._lots for run in lot.rest)]

    @property
    def end(self) -> int | None:
        """A clock after all those of all workers; None where each does its own share and nothing else."""
        if all(lot.own == self._steps and not lot.lent for lot in self._lots):
            return None
        return 1 + max(lot.end for lot in self._lots)

    def commit(self, rank: int, clock: int) -> None:
        """The first `clock` batches of this worker are in the model."""
        lot, before = self._lots[rank], self._lots[rank].clock
        end = lot.end
        lot.clock = max(before, min(clock, end))
        self._unfinished -= before < end <= lot.clock

    def give_up(self, rank: int) -> None:
        """The worker has gone: what it has not done is free."""
        lot = self._lots[rank]
        self._free.extend(lot.rest)
        self._unfinished -= not lot.is_done
        self._lots[rank] = Lot(rank, own=0, start=lot.clock, clock=lot.clock)

    def take(self, rank: int) -> tuple[Batch, int] | None:
        """A free batch for this worker, and the clock at which it does it; None if there is none now."""
        if not self._free:
            return None
        lot = self._lots[rank]
        if lot.own == 0 and not lot.lent:
            # it came back, and goes on beside the slowest: else that one would wait for it
            at_work = [other.clock for other in self._lots if not other.is_done]
            lot.start = lot.clock = min(at_work, default=lot.clock)
        owner, place, end = self._free.popleft()
        if place + 1 < end:
            self._free.appendleft((owner, place + 1, end))
        self._unfinished += lot.is_done
        lot.lent.append((owner, place))
        return (owner, place), lot.end - 1

    @property
    def finished(self) -> bool:
        """Whether every batch is in the model."""
        return not self._free and not self._unfinished

    @property
    def has_free(self) -> bool:
        """Whether a batch waits for a worker."""
        return bool(self._free)

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        lots, free = [asdict(lot) for lot in self._lots], [list(run) for run in self._free]
        return {"steps": self._steps, "lots": lots, "free": free}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._steps = state["steps"]
        self._lots = [
            Lot(
                saved["rank"],
                saved["own"],
                saved["start"],
                saved["clock"],
                [(owner, place) for owner, place in saved["lent"]],
            )
            for saved in state["lots"]
        ]
        self._free = deque((owner, place, end) for owner, place, end in state["free"])
        self._count_unfinished()

    def _count_unfinished(self) -> None:
        self._unfinished = sum(not lot.is_done for lot in self._lots)
