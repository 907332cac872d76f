"""Agreement: that all workers bring the same to a sum, without asking where it can be known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass

from shoal.core.errors import PeerLost

GRACE_SECONDS = 2.0
"""How long the survivors of a sum that failed wait to hear who else survived."""

Signature = str
"""What a worker brings to a sum: ascii, equal for those that fit together, as in "1000 x float32"."""


@dataclass(frozen=True)
class Position:
    """How far a worker is: the number of its latest sum, and what it brought to that."""

    number: int = 0
    brings: Signature = ""


class Agreement(ABC):
    """Where one worker is in the schedule of sums, and who fell out of it.

    Expected is what followed last time. All workers agreed on everything so far, so they all expect the
    same; one that brings something else asks the others, who do not answer, and nobody begins a sum of a
    wrong length. What was refused leaves no trace but its number, or the workers would expect different
    things from then on. `gone` tells who has left, or was lost, and may grow.
    """

    silent = "did not come in time"
    """What is said of a worker that is not gone and not heard of."""

    def __init__(self, rank: int, workers: int, gone: Set[int]) -> None:
        self.rank, self.workers, self.gone = rank, workers, gone
        self.here = Position()  # other threads may read it: replaced, never changed
        self._agreed: Signature | None = None
        self._successor: dict[Signature, Signature] = {}
        self._broken: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a sum has failed; all later ones do then."""
        return self._broken is not None

    def reach(self, brings: Signature, deadline: float) -> None:
        """Go on to the next sum. Waits for the others only if it is not what was to be expected.

        Raises ValueError if they bring something else, PeerLost if they do not come or an earlier sum failed.
        """
        if self._broken is not None:
            raise PeerLost(self._broken)
        self.here = Position(self.here.number + 1, brings)
        if self._expected() != brings:
            self._refuse_mismatch(self._compare(deadline))
        if self._agreed is not None:
            self._successor[self._agreed] = brings
        self._agreed = brings

    def failure(self, deadline: float) -> PeerLost:
        """What there is to be said of a sum that failed: who is missing. Raises ValueError for a mismatch."""
        self._broken = failed = (
            f"all_reduce {self.here.number} of {self.here.brings} failed (I am worker {self.rank})"
        )
        found = {self.rank: self.here, **self._roll_call(deadline)}
        self._refuse_mismatch(found)
        fates = ", ".join(self._fates(found)) or "everyone is alive, but somebody came late"
        self._broken = f"{failed}: {fates}"
        return PeerLost(self._broken)

    @abstractmethod
    def _compare(self, deadline: float) -> dict[int, Position]:
        """What all workers bring to this sum. Raises `failure` if not all come in time."""

    @abstractmethod
    def _roll_call(self, deadline: float) -> dict[int, Position]:
        """How far the other workers are, after a failure; those that do not answer are left out."""

    def _expected(self) -> Signature | None:
        return None if self._agreed is None else self._successor.get(self._agreed, self._agreed)

    def _fates(self, found: dict[int, Position]) -> Iterable[str]:
        for rank in range(self.workers):
            if rank in found:
                if found[rank].number < self.here.number:
                    yield f"worker {rank} did not come in time"
            else:
                yield f"worker {rank} {'is gone' if rank in self.gone else self.silent}"

    def _refuse_mismatch(self, found: dict[int, Position]) -> None:
        number = self.here.number
        brought = {rank: there.brings for rank, there in found.items() if there.number == number}
        if len(set(brought.values())) > 1:
            listed = ", ".join(f"worker {rank} brings {what}" for rank, what in sorted(brought.items()))
            raise ValueError(f"all_reduce {number} needs the same dtype and length from all: {listed}")
