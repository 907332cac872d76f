"""Faults in virtual time: crashes and pauses at exact steps, and an unreliable network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, isfinite


class Crash(BaseException):
    """Ends a simulated node at once, as kill -9 would."""


@dataclass(frozen=True)
class Faults:
    """Crashes and pauses, addressed by (rank, step) or by time: `Faults().crash(rank=2, step=5)`.

    A crashed node restarts after `restart_after` seconds, as the next incarnation; by default it never does.
    """

    crashes: frozenset[tuple[int, int]] = frozenset()
    kills: tuple[tuple[int, float], ...] = ()  # (rank, virtual seconds since the start); workers and servers
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    noticed_after: float = 1.0  # seconds until its peers notice a crashed node
    restart_after: float = inf

    @property
    def recovery(self) -> float:
        """Seconds that a node waits for a lost peer to restart, counted from the notice of the loss."""
        return self.restart_after + self.noticed_after if isfinite(self.restart_after) else 0.0

    def crash(self, rank: int, step: int) -> Faults:
        """Add a crash: the worker vanishes in that step, before it sends its gradient to anyone."""
        return replace(self, crashes=self.crashes | {(rank, step)})

    def kill(self, rank: int, moment: float) -> Faults:
        """Add a kill: the node, worker or server, vanishes at that virtual second, whatever it is doing."""
        return replace(self, kills=(*self.kills, (rank, moment)))

    def pause(self, rank: int, step: int, seconds: float) -> Faults:
        """Add a pause: the worker stops for `seconds` in that step."""
        return replace(self, pauses={**self.pauses, (rank, step): seconds})

    def check(self, workers: int, nodes: int) -> None:
        """Raise ValueError for a fault that can never happen because its node does not exist."""
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
        """Seconds that the worker pauses in that step. Raises Crash if it crashes there."""
        if (rank, step) in self.crashes:
            raise Crash
        return self.pauses.get((rank, step), 0.0)


@dataclass(frozen=True)
class Weather:
    """An unreliable network: messages are lost, duplicated, delayed and reordered until a given time.

    Nodes on such a network must repeat their requests: pass `retry` to the simulation.
    """

    loss: float = 0.0  # probability that a message never arrives
    double: float = 0.0  # probability that a message arrives twice
    delay: float = 0.0  # most extra seconds of a message, drawn for each, so messages overtake each other
    until: float = inf  # virtual second from which the network is reliable
