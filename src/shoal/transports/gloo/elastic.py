"""ElasticGloo: gloo's all-reduce where workers come and go, in a new group for each set of members.

A group of gloo cannot go on without one of its members. Messages therefore travel over sockets, which can,
and an all-reduce that somebody has left is broken off: whoever is left forms another group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.transports.all_reduce import ring_bytes
from shoal.transports.gloo.all_reduce import NO_TIMEOUT, GlooGroup, break_group, finish_on_cpu
from shoal.transports.gloo.nccl import finish_on_gpu, join_gpus, leave_gpus
from shoal.transports.gloo.transport import devices, new_group
from shoal.transports.rendezvous import Store
from shoal.transports.sockets import SocketTransport

LOOK_UP = timedelta(milliseconds=20)
"""While we wait for an all-reduce, how often we look whether it is called off."""

LONGEST_PAUSE = 0.02
"""The same while we wait for the others to come to the group."""

CONNECTING_SECONDS = 5.0
"""How long gloo may take to connect workers that have all come."""

SOON_SECONDS = 1.0
"""After this time in an all-reduce we tell the others that we are there, should they ask who is late."""

CalledOff = Callable[[], bool]


class ElasticGloo(SocketTransport):
    """Messages between the processes of one host, and all-reduces over those who are members now."""

    _ring: GlooRing | None = None
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
        timeout = self.timeout if timeout is None else timeout
        ring = self._ring = self._ring or self._new_ring()
        began = time.monotonic()

        def give_up() -> bool:
            waited = time.monotonic() - began
            if waited > min(SOON_SECONDS, timeout / 2):
                ring.say_here()
            return self._is_called_off() or waited > timeout

        try:
            ring.sum(v, give_up)
        except PeerLost as error:
            late = [f"worker {self._members[place]}" for place in ring.late()]
            if not late or self._is_called_off() or time.monotonic() - began <= timeout:
                raise
            raise PeerLost(f"{error}. {', '.join(late)} did not come to it within {timeout:g} s") from error
        return ring_bytes(v.nbytes, len(self._members))

    async def close(self) -> None:
        """Leave the group, then the run."""
        self._leave_ring()
        await super().close()

    def _new_ring(self) -> GlooRing:
        assert self._store is not None, "a transport that is closed has no all-reduce"
        place, size = self._members.index(self.rank), len(self._members)
        names = ".".join(map(str, self._members))
        return GlooRing(self._store, f"ring of {names} in epoch {self._epoch}", place, size)

    def _leave_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None


class GlooRing:
    """One group of gloo, of `size` workers. It is formed with the first all-reduce, when all have come."""

    def __init__(self, store: Store, name: str, place: int, size: int) -> None:
        c10d: Any = dist  # torch's stubs do not know PrefixStore
        self._store: Store = c10d.PrefixStore(f"shoal/{name}", store)
        self._name, self._place, self._size = name, place, size
        self._group: GlooGroup | None = None
        self._gpus: Any = None  # a ProcessGroupNCCL
        self._is_broken = False
        self._begun = self._said = 0  # all-reduces; the last that others know we have come to

    def sum(self, v: Tensor, give_up: Callable[[], bool]) -> None:
        """Sum `v` over the workers, in place. Raises PeerLost when `give_up` says so, or one leaves."""
        if self._is_broken:
            raise PeerLost(f"the {self._name} is broken")
        self._begun += 1
        try:
            group = self._group or self._form(v, give_up)
            if self._gpus is not None:
                finish_on_gpu([self._gpus.allreduce([v])], give_up)
            else:
                staged = v.cpu()
                work = group.allreduce(staged, dist.ReduceOp.SUM, NO_TIMEOUT)
                finish_on_cpu([work], give_up, LOOK_UP)
                if v.is_cuda:
                    v.copy_(staged)
        except RuntimeError as error:
            self.close()
            raise PeerLost(f"an all-reduce in the {self._name} was broken off: {error}") from error

    def say_here(self) -> None:
        """Let the others know that this worker waits in the all-reduce, should one ask who is late."""
        if self._said < self._begun:
            self._said = self._begun
            self._store.set(f"waits/{self._begun}/{self._place}", "")

    def late(self) -> list[int]:
        """The places of those who have not said that they wait in the last all-reduce."""
        others = (place for place in range(self._size) if place != self._place)
        return [place for place in others if not self._store.check([f"waits/{self._begun}/{place}"])]

    def close(self) -> None:
        """Break off an all-reduce under way, here and at the others, and release the group."""
        self._is_broken = True
        if self._group is not None:
            break_group(self._group, (self._place + 1) % self._size)
        if self._gpus is not None:
            leave_gpus(self._gpus)
        self._group = self._gpus = None

    def _form(self, v: Tensor, give_up: Callable[[], bool]) -> GlooGroup:
        """Wait for the others, and connect. Raises RuntimeError if they do not come."""
        keys = [f"here/{place}" for place in range(self._size)]
        self._store.set(keys[self._place], "")
        pause = 0.001
        while not self._store.check(keys):
            if give_up():
                raise RuntimeError("not all have come")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._group = group = new_group(
            self._store, "gloo", self._place, self._size, devices(), CONNECTING_SECONDS, threads=1
        )
        if v.is_cuda:
            self._gpus = join_gpus(
                self._store, self._place, self._size, v.device, CONNECTING_SECONDS, frozenset()
            )
        return group
