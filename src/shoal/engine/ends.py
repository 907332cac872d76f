"""Ends: which workers of an elastic run have come to the end, and which leave before it."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.transport import Message


class Ends:
    """What one worker has heard of how the others end.

    One that has ended, and was let in again since, has not.
    """

    def __init__(self) -> None:
        self.rounds: dict[int, int] = {}  # who has ended -> rounds completed
        self.goodbyes: dict[int, int] = {}  # who has said goodbye -> incarnation
        self._epochs: dict[int, int] = {}  # who has ended -> the epoch
        self._let_in: dict[int, int] = {}  # who joined -> the epoch that let it in last

    def let_in(self, joiners: Iterable[tuple[int, int]]) -> None:
        """These have joined, each since that epoch."""
        self._let_in |= dict(joiners)
        for rank in [rank for rank in self.rounds if self._epochs[rank] < self._let_in.get(rank, 0)]:
            del self.rounds[rank]

    def note(self, m: Message) -> bool:
        """A worker has ended; whether it has not joined again since."""
        if m.version < self._let_in.get(m.src, 0):
            return False
        self.rounds[m.src], self._epochs[m.src] = m.seq, m.version
        return True

    async def note_goodbye(self, m: Message) -> None:
        """A worker leaves before the end: there will be an epoch without it."""
        self.goodbyes[m.src] = m.incarnation
