"""ElasticGloo: gloo's all-reduce where workers come and go, in a new group for each set of members.

A group of gloo cannot go on without one of its members. Messages therefore travel over sockets, which can,
and an all-reduce that somebody has left is broken off: whoever is left forms another group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.core.transport import Reduction
from shoal.transports.all_reduce import Position
from shoal.transports.gloo.all_reduce import GlooAllReduce, GlooGroup, StoreSchedule
from shoal.transports.gloo.transport import devices, new_group
from shoal.transports.rendezvous import Store
from shoal.transports.sockets import SocketTransport

LOOK_UP = timedelta(milliseconds=20)
"""While we wait for an all-reduce, how often we look whether it is called off."""

CONNECTING_SECONDS = 5.0
"""How long gloo may take to connect workers that have all come."""

CalledOff = Callable[[], bool]


class ElasticGloo(SocketTransport):
    """Messages between the processes of one host, and all-reduces over those who are members now."""

    _ring: ElasticRing | None = None
    _members: Sequence[int] = ()
    _epoch = 0

    def regroup(self, members: Sequence[int], epoch: int, is_called_off: CalledOff) -> None:
        """From now on all-reduces are over these nodes, each of which says so with the same epoch.

        `is_called_off` says, while one waits, that not all of them will come.
        """
        self._leave_ring()
        self._members, self._epoch, self._is_called_off = members, epoch, is_called_off

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the members, in place; returns the bytes that a ring all-reduce sends.

        Raises PeerLost if that is called off, or after `timeout` seconds. Then `v` is undefined, and every
        later call fails until the next `regroup`.
        """
        return self._own_ring().sum(v, self.timeout if timeout is None else timeout)

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """All-reduce part by part: gloo's thread sums started parts while the rest is computed.

        The first of a group, and one that the others may not expect, begins when all parts are there.
        Fails as `all_reduce` does, in `finish`.
        """
        ring, seconds = self._own_ring(), self.timeout if timeout is None else timeout
        return ring.begin(v, parts, seconds) if ring.can_begin(v, parts) else _Later(ring, v, parts, seconds)

    async def close(self) -> None:
        """Leave the group, then the run."""
        self._leave_ring()
        await super().close()

    def _own_ring(self) -> ElasticRing:
        if self._ring is None:
            assert self._store is not None, "a transport that is closed has no all-reduce"
            self._ring = ElasticRing(self._store, self.rank, self._members, self._epoch, self._is_called_off)
        return self._ring

    def _leave_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None


class ElasticRing(GlooAllReduce):
    """All-reduces over one set of members. Their group is formed with the first, when all have come."""

    def __init__(
        self, store: Store, rank: int, members: Sequence[int], epoch: int, is_called_off: CalledOff
    ) -> None:
        name = f"ring of {'.'.join(map(str, members))} in epoch {epoch}"
        c10d: Any = dist  # torch's stubs do not know PrefixStore
        own: Store = c10d.PrefixStore(f"shoal/{name}", store)
        gone = _AllOnce(members, is_called_off)
        super().__init__(None, _RingSchedule(name, rank, members, gone, own), gone)
        self._name = name
        self._is_called_off = is_called_off
        self._failure: RuntimeError | None = None  # of a part that could not be started

    def can_begin(self, v: Tensor, parts: Sequence[slice]) -> bool:
        """Whether parts can be started before all are there, so that nobody waits for anybody meanwhile."""
        is_whole = self._ring is not None and self._failure is None and not self.schedule.is_broken
        return is_whole and self.schedule.expects(self.shape_of(v, parts)[1])

    def close(self) -> None:
        """Break off what is under way, here and at the others, and release the group."""
        self.stop()
        super().close()

    def _post(self, staged: Tensor) -> list[dist.Work]:
        """Start to sum. What fails here is raised in `_wait`, outside of the user's back-propagation."""
        if self._failure is not None:  # what the others have begun must not meet with a later part
            return []
        try:
            if self._ring is None:
                self._ring = self._form()
            return super()._post(staged)
        except RuntimeError as error:
            self._failure = error
            return []

    def _form(self) -> GlooGroup:
        place, size = self.schedule.place, self.schedule.workers
        return new_group(self._store, "gloo", place, size, devices(), CONNECTING_SECONDS, threads=1)

    def _wait(self, works: list[dist.Work], deadline: float) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._finish(works, lambda: self._is_called_off() or time.monotonic() > deadline, LOOK_UP)
        except RuntimeError as error:
            if time.monotonic() > deadline and not self._is_called_off():
                raise self.schedule.failure(deadline) from error
            self.close()
            raise self.schedule.break_off(f"the {self._name} was broken off: {error}") from error


class _RingSchedule(StoreSchedule):
    """Compares positions through the store of this host, which always answers."""

    def __init__(self, name: str, rank: int, members: Sequence[int], gone: Set[int], store: Store) -> None:
        super().__init__(rank, members, gone, store)
        self._name = name

    def _exchange(self, what: str, seconds: float, answers_in: float = math.inf) -> dict[int, Position]:
        found = self._ask_store(what, seconds)
        if len(found) < self.workers and self.gone:
            raise self.break_off(f"the {self._name} was broken off: not all have come")
        return found


class _AllOnce(Set[int]):
    """All members once their all-reduces are called off: then nobody waits for any of them."""

    def __init__(self, members: Sequence[int], is_called_off: CalledOff) -> None:
        self._members, self._is_called_off = members, is_called_off

    def __contains__(self, rank: object) -> bool:
        return self._is_called_off() and rank in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._members if self._is_called_off() else ())

    def __len__(self) -> int:
        return len(self._members) if self._is_called_off() else 0


class _Later:
    """An all-reduce that begins when the whole vector is there."""

    def __init__(self, ring: ElasticRing, v: Tensor, parts: Sequence[slice], seconds: float) -> None:
        self._ring, self._v, self._parts, self._seconds = ring, v, parts, seconds

    def start(self, part: int) -> None:
        """Do nothing: `finish` starts all parts."""

    async def finish(self) -> int:
        """Sum the vector. Returns the bytes that a ring all-reduce sends."""
        return self._ring.begin(self._v, self._parts, self._seconds).complete()
