"""Links: which nodes reach each other. A partition cuts links; a connection that is cut for long breaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Protocol, TypeAlias

from shoal.core.transport import JOINED, LEFT, LOST, NOTICES, Message
from shoal.sim.faults import Partition
from shoal.sim.kernel import Kernel

Pair: TypeAlias = "tuple[int, int]"
"""Two nodes, the lower rank first."""

Connection: TypeAlias = "tuple[int, int]"
"""How many between these two broke before it, and how often the relay had died."""


class End(Protocol):
    """A node's end of its links."""

    @property
    def has_left(self) -> bool:
        """Whether it closed in order."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether it closed or crashed."""
        ...

    def deliver(self, m: Message) -> None:
        """A message arrives."""
        ...

    def hear_of(self, peer: Any, tag: str) -> None:
        """The connection to a peer broke, or is there again."""
        ...

    def knows(self, peer: int) -> bool:
        """Whether it has a connection to that node."""
        ...


class Links:
    """The connections between simulated nodes while partitions come and heal.

    What is sent over a link that is cut is held back. If the link heals in time it arrives then; if not, the
    connection breaks: both nodes are told that the other is lost, what was under way is dropped, and when the
    link heals both are told that the other is back, in the same incarnation if it was not restarted.

    With a `relay`, which passes on what the others send each other, their connections break when it dies and
    are there again with its successor.
    """

    def __init__(self, kernel: Kernel, ends: Sequence[End]) -> None:
        self.is_used = False
        self.on_break: Callable[[int, int], None] = lambda one, other: None  # of a connection
        self._relay: int | None = None
        self._deaths_of_relay = self._noticed_deaths = 0
        self._misses_relay = False  # whether the others know that it is away
        self._kernel = kernel
        self._ends = ends
        self._sides: list[frozenset[int]] = []  # one side of each partition that lasts
        self._broken: set[Pair] = set()
        self._connections: Counter[Pair] = Counter()  # how many have broken between these two
        self._held: defaultdict[Pair, list[tuple[int, Message]]] = defaultdict(list)

    def plan(self, partition: Partition, patience: float) -> None:
        """Have a partition happen; a link that is cut for `patience` seconds breaks."""
        self.is_used = True
        begin, end = partition.at, partition.at + partition.seconds
        self._kernel.at(begin, partial(self._sides.append, partition.ranks))
        if patience < partition.seconds:
            self._kernel.at(begin + patience, partial(self._break, partition.ranks))
        self._kernel.at(end, partial(self._heal, partition.ranks))

    def pass_through(self, relay: int) -> None:
        """Have that node relay what the others send each other."""
        self.is_used, self._relay = True, relay

    def lose(self, rank: int, noticed_after: float) -> None:
        """That node has died: if it is the relay, what it was to pass on is lost."""
        if rank == self._relay:
            self._deaths_of_relay += 1
            for pair in self._relayed():
                self._held.pop(pair, None)
            self._kernel.after(noticed_after, partial(self._miss_relay, self._deaths_of_relay))

    def regain(self, rank: int) -> None:
        """That node is there again."""
        if rank == self._relay:
            self._miss_relay(self._deaths_of_relay)
            self._misses_relay = False
            self._restore(self._relayed())

    def _miss_relay(self, deaths: int) -> None:
        """The others notice that the relay has died so many times, with its successor at the latest."""
        if deaths > self._noticed_deaths:
            self._noticed_deaths, self._misses_relay = deaths, True
            self._cut_connections(self._relayed())

    def _relayed(self) -> Iterator[Pair]:
        """The links that the relay stands for."""
        ranks = [rank for rank in range(len(self._ends)) if rank != self._relay]
        return (pair for pair in combinations(ranks, 2) if self._ends[pair[0]].knows(pair[1]))

    def connection(self, src: int, dst: int) -> Connection:
        """The connection that a message is sent over."""
        return self._connections[_pair(src, dst)], self._deaths_of_relay

    def is_broken(self, one: int, other: int) -> bool:
        """Whether these two have been told that the other is lost."""
        return _pair(one, other) in self._broken

    def arrive(self, src: int, dst: int, connection: Connection, m: Message) -> None:
        """A message arrives at the far end of a link, if the link and its connection are still there."""
        pair = _pair(src, dst)
        number, deaths_of_relay = connection
        if (
            number != self._connections[pair]
            or pair in self._broken
            or self._is_lost(pair, m, deaths_of_relay)
        ):
            return
        if self._is_cut(pair):
            self._held[pair].append((dst, m))
        else:
            self._ends[dst].deliver(m)

    def _is_lost(self, pair: Pair, m: Message, deaths_of_relay: int) -> bool:
        """Whether a message that the relay was to pass on is lost with it."""
        if self._relay is None or self._relay in pair or m.tag in NOTICES:
            return False
        return self._ends[self._relay].is_gone or deaths_of_relay != self._deaths_of_relay

    def _break(self, side: frozenset[int]) -> None:
        self._cut_connections(self._across(side))

    def _cut_connections(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            if pair not in self._broken:
                self._broken.add(pair)
                self._connections[pair] += 1
                self._held.pop(pair, None)
                self.on_break(*pair)
                for one, other in (pair, pair[::-1]):
                    self._ends[one].hear_of(self._ends[other], LOST)

    def _heal(self, side: frozenset[int]) -> None:
        self._sides.remove(side)
        self._restore(self._across(side))

    def _restore(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            if self._is_cut(pair):
                continue  # by another partition, or by the relay's death
            for dst, m in self._held.pop(pair, ()):
                self._ends[dst].deliver(m)
            if pair in self._broken:
                self._broken.discard(pair)
                for one, other in (pair, pair[::-1]):
                    peer = self._ends[other]
                    self._ends[one].hear_of(peer, LEFT if peer.has_left else LOST if peer.is_gone else JOINED)

    def _across(self, side: frozenset[int]) -> Iterator[Pair]:
        """The links that lead out of this side, where two nodes know of each other."""
        for one, other in ((a, b) for a in sorted(side) for b in range(len(self._ends)) if b not in side):
            if self._ends[one].knows(other):
                yield _pair(one, other)

    def _is_cut(self, pair: Pair) -> bool:
        one, other = pair
        is_apart = self._misses_relay and self._relay not in pair
        return is_apart or any((one in side) != (other in side) for side in self._sides)


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
