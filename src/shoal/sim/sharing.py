"""SharingTransport: simulated nodes that map the memory of others on their host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.core.transport import Message
from shoal.sim.transport import SimTransport, Switch


class SharingTransport(SimTransport):
    """The transport of a node whose neighbours read its memory in place: `Shows`, in virtual time.

    What a node reads and writes there costs what an operation on vectors costs anywhere.
    """

    def __init__(self, switch: Switch, rank: int) -> None:
        super().__init__(switch, rank)
        self._shared: dict[int, SharedVector] = {}  # by their address

    def can_show(self, dst: int) -> bool:
        """Whether both are on one host."""
        return self._switch.host_of(dst) is self._host

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like` that others can read."""
        with self.apart():
            copy = like.clone()
        self._shared[copy.data_ptr()] = SharedVector(copy)
        return copy

    async def show(self, dst: int, m: Message) -> None:
        """Have `dst` map the only part of `m`, which came from `share`."""
        peer, (part,) = self._switch.ends[dst], m.parts
        self.acquaint(peer)
        if peer.is_gone:
            peer._tell(self.rank)
            return
        shown = m.copied(self.rank, m.parts)
        shown.release = self._shared[part.data_ptr()].reader()
        arrive = self._switch.arrival(self.rank, dst, shown)
        self._switch.transfer(self.rank, dst, Message(m.tag), arrive)

    def revise(self, shown: Tensor) -> None:
        """Readers learn that this memory changes from now on."""
        self._shared[shown.data_ptr()].revision += 1


@dataclass
class SharedVector:
    """Memory that others read, and how often it was changed."""

    x: Tensor  # keeps its address taken
    revision: int = 0

    def reader(self) -> Callable[[], bool]:
        """What a reader calls after each read: whether there was exactly one revision since the last."""
        seen = self.revision

        def is_consistent() -> bool:
            nonlocal seen
            before, seen = seen, self.revision
            return seen == before + 1

        return is_consistent
