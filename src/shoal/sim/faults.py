"""What goes wrong in virtual time: crashes and pauses at exact places, and weather on the network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, isfinite


class Crash(BaseException):
    """Ends a simulated node on the spot, as kill -9 would."""


@dataclass(frozen=True)
class Faults:
    """Crashes and pauses, addressed by (rank, step) or by moment: `Faults().crash(rank=2, step=5)`.

    A node that crashed comes back after `restart_after` seconds, as the next incarnation; by default never.
    """

    crashes: frozenset[tuple[int, int]] = frozenset()
    kills: tuple[tuple[int, float], ...] = ()  # (rank, moment); servers too
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    noticed_after: float = 1.0  # seconds until the peers of a crashed node are told
    restart_after: float = inf

    @property
    def recovery(self) -> float:
        """How long after it was told so a node waits for another to come back."""
        return self.restart_after + self.noticed_after if isfinite(self.restart_after) else 0.0

    def crash(self, rank: int, step: int) -> Faults:
        """The worker vanishes in that step, before anyone hears of its gradient."""
        return replace(self, crashes=self.crashes | {(rank, step)})

    def kill(self, rank: int, moment: float) -> Faults:
        """The node, worker or server, vanishes at that moment, whatever it is doing."""
        return replace(self, kills=(*self.kills, (rank, moment)))

    def pause(self, rank: int, step: int, seconds: float) -> Faults:
        """The worker stands still for `seconds` in that step."""
        return replace(self, pauses={**self.pauses, (rank, step): seconds})

    def check(self, workers: int, nodes: int) -> None:
        """Raise ValueError for a fault of a node that does not exist: it would never happen."""
        for rank, step in [*self.crashes, *self.pauses]:
            if not (0 <= rank < workers and step >= 0):
                raise ValueError(
                    f"there is no worker {rank} with a step {step}: workers are 0 to {workers - 1}"
                )
        for rank, moment in self.kills:
            if not (0 <= rank < nodes and moment >= 0):
                raise ValueError(
                    f"there is no node {rank} to kill at {moment:g} s: nodes are 0 to {nodes - 1}"
                )

    def delay(self, rank: int, step: int) -> float:
        """Seconds the worker stands still in that step. Raises Crash where it vanishes."""
        if (rank, step) in self.crashes:
            raise Crash
        return self.pauses.get((rank, step), 0.0)


@dataclass(frozen=True)
class Weather:
    """A network that keeps no promise until it calms down: messages are lost, doubled, late, out of order.

    A node on such a network has to ask again: give the simulation a `retry`.
    """

    loss: float = 0.0  # probability that a message never arrives
    double: float = 0.0  # probability that it arrives twice
    delay: float = 0.0  # each arrives up to so many seconds late, so they overtake each other
    until: float = inf  # when it calms down
