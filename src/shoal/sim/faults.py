"""Faults at exact places: the worker and the step, not a moment on a clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


class Crash(BaseException):
    """Ends a simulated node on the spot, as kill -9 would."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong, addressed by (rank, step): `Faults().crash(rank=2, step=5)`."""

    crashes: frozenset[tuple[int, int]] = frozenset()
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    noticed_after: float = 1.0  # seconds until the peers of a crashed node are told

    def crash(self, rank: int, step: int) -> Faults:
        """The worker vanishes in that step, before anyone hears of its gradient."""
        return replace(self, crashes=self.crashes | {(rank, step)})

    def pause(self, rank: int, step: int, seconds: float) -> Faults:
        """The worker stands still for `seconds` in that step."""
        return replace(self, pauses={**self.pauses, (rank, step): seconds})

    def check(self, workers: int) -> None:
        """Raise ValueError for a fault of a worker that does not exist: it would never happen."""
        for rank, step in [*self.crashes, *self.pauses]:
            if not (0 <= rank < workers and step >= 0):
                raise ValueError(
                    f"there is no worker {rank} with a step {step}: workers are 0 to {workers - 1}"
                )

    def delay(self, rank: int, step: int) -> float:
        """Seconds the worker stands still in that step. Raises Crash where it vanishes."""
        if (rank, step) in self.crashes:
            raise Crash
        return self.pauses.get((rank, step), 0.0)
