"""Faults in virtual time: crashes, pauses, partitions, clocks that jump, slow disks, a bad network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf, isfinite


class Departure(BaseException):
    """Ends a simulated worker between two steps, with a goodbye."""


class Crash(BaseException):
    """Ends a simulated node at once, as kill -9 would."""


@dataclass(frozen=True)
class Partition:
    """Nodes that reach each other and nobody else, from second `at` on, for so many seconds."""

    ranks: frozenset[int]
    at: float
    seconds: float


@dataclass(frozen=True)
class Faults:
    """What goes wrong, addressed by (rank, step) or by time: `Faults().crash(rank=2, step=5)`.

    A crashed node restarts after `restart_after` seconds, as the next incarnation; by default it never does.
    Ranks count workers first, then servers, then the keeper of an elastic run.
    """

    crashes: frozenset[tuple[int, int]] = frozenset()
    kills: tuple[tuple[int, float], ...] = ()  # (rank, virtual seconds since the start); workers and servers
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    noticed_after: float = 1.0  # seconds until its peers notice a crashed node
    restart_after: float = inf
    patience: float = 1.0  # seconds of silence after which a connection breaks
    partitions: tuple[Partition, ...] = ()
    clock_jumps: tuple[tuple[int, float, float], ...] = ()  # (rank, virtual second, seconds forward)
    slow_disks: tuple[tuple[int, float, float], ...] = ()  # (rank, virtual second, for how long)
    joins: tuple[tuple[int, float], ...] = ()  # (rank, virtual second)
    leaves: tuple[tuple[int, float], ...] = ()  # (rank, virtual second), in an elastic run

    @property
    def recovery(self) -> float:
        """Seconds that a node waits for a lost peer to come back, counted from the notice of the loss."""
        restart = self.restart_after + self.noticed_after if isfinite(self.restart_after) else 0.0
        return restart + sum(partition.seconds for partition in self.partitions)

    def crash(self, rank: int, step: int) -> Faults:
        """Add a crash: the worker vanishes in that step, before it sends its gradient to anyone."""
        return replace(self, crashes=self.crashes | {(rank, step)})

    def kill(self, rank: int, moment: float) -> Faults:
        """Add a kill: the node, worker or server, vanishes at that virtual second, whatever it is doing."""
        return replace(self, kills=(*self.kills, (rank, moment)))

    def join(self, rank: int, moment: float) -> Faults:
        """Add a worker: it takes that place, which nobody has had so far, at that virtual second."""
        return replace(self, joins=(*self.joins, (rank, moment)))

    def leave(self, rank: int, moment: float) -> Faults:
        """Add a goodbye: the worker of an elastic run leaves it before its first step after that second."""
        return replace(self, leaves=(*self.leaves, (rank, moment)))

    def pause(self, rank: int, step: int, seconds: float) -> Faults:
        """Add a pause: the worker stops for `seconds` in that step."""
        return replace(self, pauses={**self.pauses, (rank, step): seconds})

    def partition(self, ranks: Iterable[int], at: float, seconds: float) -> Faults:
        """Add a partition: from second `at` on, for so many seconds, these nodes reach each other alone.

        What is sent across is held back. After `patience` seconds without a word connections break: both
        sides are told that the other is lost, what was under way is dropped, and when the partition heals
        both are told that the other is back.
        """
        return replace(self, partitions=(*self.partitions, Partition(frozenset(ranks), at, seconds)))

    def clock_jump(self, rank: int, at: float, by: float) -> Faults:
        """Add a jump: at second `at` the clock of that node leaps `by` seconds, back if that is negative."""
        return replace(self, clock_jumps=(*self.clock_jumps, (rank, at, by)))

    def slow_disk(self, rank: int, at: float, seconds: float) -> Faults:
        """Add a slow disk: what that node writes in the `seconds` from `at` on is on its disk at their end.

        The node waits for it; if it is killed meanwhile, a snapshot that was being written is not there.
        """
        return replace(self, slow_disks=(*self.slow_disks, (rank, at, seconds)))

    def check(
        self, workers: int, nodes: int, writers: Iterable[int] = (), places: Iterable[int] = ()
    ) -> None:
        """Raise ValueError for a fault that can never happen because its node or time does not exist.

        `writers` are the nodes that have a disk, `places` those that nobody has at the start.
        """
        open_places = sorted(places)
        for rank, moment in self.joins:
            if rank not in open_places or moment < 0:
                raise ValueError(
                    f"nobody can join as worker {rank} at {moment:g} s: places {open_places} are open, one "
                    "worker each"
                )
            open_places.remove(rank)
        for rank, moment in self.leaves:
            if not (0 <= rank < workers and moment >= 0):
                raise ValueError(f"there is no worker {rank} to leave at {moment:g} s")
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

        self._check_times(nodes)
        for rank, _, _ in self.slow_disks:
            if rank not in (having := sorted(writers)):
                who = f"nodes {', '.join(map(str, having))} do" if having else "no node here does"
                raise ValueError(f"node {rank} writes to no disk that could be slow: {who}")

    def _check_times(self, nodes: int) -> None:
        for cut in self.partitions:
            if not cut.ranks or not all(0 <= rank < nodes for rank in cut.ranks) or len(cut.ranks) == nodes:
                raise ValueError(
                    f"a partition of nodes {sorted(cut.ranks)} has nobody on one side, or somebody who does "
                    f"not exist: nodes are 0 to {nodes - 1}"
                )
        for rank, at, by in self.clock_jumps:
            if not (0 <= rank < nodes and at >= 0 and isfinite(by)):
                raise ValueError(
                    f"the clock of node {rank} cannot jump by {by:g} s at {at:g} s: "
                    f"nodes are 0 to {nodes - 1}, and times begin with 0"
                )
        timed = [("a partition", cut.at, cut.seconds) for cut in self.partitions]
        timed += [("a slow disk", at, seconds) for _, at, seconds in self.slow_disks]
        for what, at, seconds in timed:
            if not (at >= 0 and 0 < seconds < inf):
                raise ValueError(
                    f"{what} from {at:g} s on, for {seconds:g} s: it begins at 0 or later, and ends"
                )

    def write_ends(self, rank: int, now: float) -> float:
        """When something that this node begins to write now is on its disk."""
        slow = [
            at + seconds for who, at, seconds in self.slow_disks if who == rank and at <= now < at + seconds
        ]
        return max([now, *slow])

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
