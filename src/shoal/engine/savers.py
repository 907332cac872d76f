"""Savers: which workers have saved their state before which step, at a server that saves when all have."""

from __future__ import annotations

from collections.abc import Callable


class Savers:
    """The workers that save a checkpoint with a server. One that dies is no longer waited for."""

    def __init__(self, workers: int) -> None:
        self.members: dict[int, int] = {}  # of the newest step of all: worker -> its incarnation
        self._workers = workers
        self._saved: dict[int, dict[int, int]] = {}  # the same of later steps
        self._clocks: dict[int, int] = {}  # of workers that were started again: that of the newest message

    def note_clock(self, rank: int, clock: int) -> None:
        """A worker that was started again has come so far. It saves before no step that is behind it."""
        self._clocks[rank] = clock

    def note(self, rank: int, incarnation: int, step: int) -> None:
        """A worker has saved before this step."""
        self._saved.setdefault(step, {})[rank] = incarnation

    def has_saved(self, rank: int) -> bool:
        """Whether a worker has saved before a step that others have not come to yet."""
        return any(rank in saved for saved in self._saved.values())

    def forget(self, rank: int) -> None:
        """A worker has died: what it has saved fits with no checkpoint to come."""
        self._clocks.pop(rank, None)
        for saved in self._saved.values():
            saved.pop(rank, None)

    def complete(self, is_idle: Callable[[int], bool]) -> int | None:
        """The newest step before which all have saved that are there and not idle; None if there is none."""
        ready = [step for step in self._saved if self._all_have(step, is_idle)]
        if not ready:
            return None
        step = max(ready)
        self.members = self._saved[step]
        self._saved = {later: saved for later, saved in self._saved.items() if later > step}
        return step

    def _all_have(self, step: int, is_idle: Callable[[int], bool]) -> bool:
        saved = self._saved[step]
        others = (rank for rank in range(self._workers) if rank not in saved)
        return bool(saved) and all(self._clocks.get(rank, 0) > step or is_idle(rank) for rank in others)
