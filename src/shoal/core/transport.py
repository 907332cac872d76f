"""Transport and Message: all that a way of moving bytes must offer to one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.core.errors import WireError

HEADER_BYTES = 104
"""Size of a message's header on every wire, so that virtual and real traffic are counted alike."""

MOST_PARTS = 4
TAG_BYTES = 16

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
)
"""What a message may carry. Their order is the protocol: add at the end, never move."""

LEFT = "left"
"""Tag of the notice that a peer closed its transport in order; nothing more comes from it."""

LOST = "lost"
"""Tag of the notice that a peer vanished without closing; nothing more comes from it unless it comes back."""

JOINED = "joined"
"""Tag of the notice that a lost peer is back; `incarnation` says as which. What was under way is lost."""

NOTICES = (LEFT, LOST, JOINED)
"""Tags that a transport alone may deliver."""


@dataclass(slots=True)
class Message:
    """What travels between two nodes: a few header fields and up to four flat tensors."""

    tag: str
    parts: tuple[Tensor, ...] = ()
    src: int = -1  # filled in by the transport
    seq: int = 0  # ties a reply to its question
    count: float = 0.0  # samples behind the body
    version: int = 0  # server version the body was made from
    rate: float = 0.0  # the sender's learning rate
    clock: int = 0  # steps that the sender has done
    incarnation: int = 0  # how often the sender was started again
    release: Callable[[], bool] | None = None  # of lent parts: call it once they are read; see Lends
    is_settled: bool = False  # whether nobody changes the parts before they are read, so they need no copy

    @property
    def body(self) -> Tensor:
        """The single tensor of a message that carries one. Raises WireError where there is none, or more."""
        if len(self.parts) != 1:
            parts = f"{len(self.parts)} parts"
            raise WireError(f"message {self.tag!r} of node {self.src} has {parts} where one is asked for")
        return self.parts[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        total = HEADER_BYTES
        for part in self.parts:
            total += part.nbytes
        return total

    def copied(self, src: int, parts: tuple[Tensor, ...]) -> Message:
        """The same message with another sender and other parts; several times as fast as `replace`."""
        new = object.__new__(type(self))
        new.tag, new.parts, new.src, new.seq, new.count = self.tag, parts, src, self.seq, self.count
        new.version, new.rate, new.clock = self.version, self.rate, self.clock
        new.incarnation, new.release, new.is_settled = self.incarnation, self.release, self.is_settled
        return new


class Transport(Protocol):
    """One node's end of the network. Messages between two nodes arrive in the order they were sent.

    A peer that closes is announced by a LEFT message from it, one that vanishes by a LOST message;
    both come after everything else it sent. Where a peer can come back, a JOINED message says that it has.
    """

    @property
    def rank(self) -> int:
        """This node's own number; workers come first, then servers."""
        ...

    @property
    def size(self) -> int:
        """Nodes in all, servers included."""
        ...

    @property
    def incarnations(self) -> Mapping[int, int]:
        """Of peers that this node has met; those that are left out have never been restarted."""
        ...

    def now(self) -> float:
        """Seconds on a clock that never goes back: virtual or monotonic."""
        ...

    async def send(self, dst: int, m: Message) -> None:
        """Hand `m` over to the network. The caller may change the tensors once this returns, unless settled.

        Never waits for `dst` to receive, with one exception: over gRPC, which bounds what a node keeps for
        others, a large message waits until there is room for it. To a peer that is gone it does nothing: the
        notice tells.
        """
        ...

    async def recv(self, timeout: float | None = None) -> Message:
        """The next message in order of arrival. Raises TimeoutError after `timeout` seconds."""
        ...

    def drain(self) -> Iterator[Message]:
        """What has arrived so far; never waits."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...

    async def close(self) -> None:
        """Flush what was sent, tell the peers, release everything. Closing twice is harmless."""
        ...


@cache
def offers(kind: type, protocol: type) -> bool:
    """Whether objects of this type have what a protocol asks for; remembered, for isinstance is slow here."""
    return issubclass(kind, protocol)


@runtime_checkable
class AllReduces(Protocol):
    """A transport with an all-reduce of its own."""

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over all workers, in place, and return the bytes this node sent for it.

        Raises PeerLost naming who is missing after `timeout` seconds.
        """
        ...


@runtime_checkable
class Regroups(Protocol):
    """A transport whose all-reduce is over those who are members now."""

    def regroup(self, members: Sequence[int], epoch: int, is_called_off: Callable[[], bool]) -> None:
        """From now on all-reduces are over these nodes, each of which says so with the same epoch.

        `is_called_off` says, while one waits, that not all of them will come.
        """
        ...


class Reduction(Protocol):
    """An all-reduce under way."""

    def start(self, part: int) -> None:
        """Part number `part` of the vector is ready, and stays as it is until the end.

        Parts start in order, each once. Never waits for others.
        """
        ...

    async def finish(self) -> int:
        """Start what was not started and wait until all is summed; the bytes this node sent for it.

        Raises PeerLost as `all_reduce` does.
        """
        ...


@runtime_checkable
class Overlaps(Protocol):
    """A transport that sums one part of a vector while another is still being computed."""

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """Sum `v` over all workers, in place, part by part: begins with those that are ready first.

        `parts` cover the flat `v` without gaps or overlaps, in any order, the same for all workers; else a
        ValueError is raised. Waits for the others only if it differs from what was to be expected. One
        reduction at a time: the next begins when this is finished. `timeout` counts from here.
        """
        ...


@runtime_checkable
class Lends(Protocol):
    """A transport whose peers can read memory of this node in place, so that a pull is one copy."""

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like`, in memory that peers can read."""
        ...

    async def lend(self, dst: int, m: Message) -> None:
        """Send `m`, whose only part came from `share`, without copying it: change it only after `reclaim`.

        It arrives with `release` set: whoever has read the part calls that, and must read again somewhere
        else if it returns False, for the memory was taken back meanwhile.
        """
        ...

    async def reclaim(self, timeout: float | None = None) -> None:
        """Wait until nobody reads what was lent. After `timeout` seconds it is taken back all the same."""
        ...


@runtime_checkable
class Shows(Protocol):
    """A transport whose peers can map memory of this node for good, and read it whenever they like."""

    def can_show(self, dst: int) -> bool:
        """Whether `dst` can map memory of this node, and this node memory of `dst`."""
        ...

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like`, in memory that peers can read."""
        ...

    async def show(self, dst: int, m: Message) -> None:
        """Send `m`, whose only part came from `share`: it arrives as a view that shows all later changes.

        It arrives with `release` set. Call it after each read: it returns whether the owner has called
        `revise` exactly once since the call before, or since it was shown. Else the read is not to be used.
        """
        ...

    def revise(self, shown: Tensor) -> None:
        """Call this before each change of shown memory."""
        ...


@runtime_checkable
class Works(Protocol):
    """A transport in virtual time, where what a node computes takes time because it says so."""

    def counts_work(self) -> bool:
        """Whether what the node computes on vectors takes time, but for what it does `apart`."""
        ...

    def charge(self, work: str, nbytes: int) -> None:
        """The node does this work ("encode", "decode") on so many bytes before anything else."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """While inside, what the node computes on vectors takes no time: that is counted elsewhere."""
        ...

    async def work(self, seconds: float) -> None:
        """Occupy a processor with work that would take it so many seconds if nobody else used it."""
        ...

    def begin_work(self, seconds: float) -> float:
        """As `work`, while the node handles messages: how long it takes, by what others do now."""
        ...


@runtime_checkable
class Watches(Protocol):
    """A transport that tells only of those who go that its node has talked with, or watches."""

    def watch(self, peer: int) -> None:
        """Tell when `peer` goes, though it may never have been heard of; at once if it has gone."""
        ...


@runtime_checkable
class Windows(Protocol):
    """A transport with memory that peers read and add to without the owner's help."""

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose a copy of the owner's `x`; all nodes call this together, with vectors of one length.

        A node that is never going to use the window may bring an empty vector. Returns the exposed memory
        itself at the owner, `x` elsewhere.
        """
        ...

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy the exposed vector into `out`; how many times it had been added to when that began.

        Each element is whole, but elements may be of different moments.
        """
        ...

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to the exposed vector; how many times it had been added to before. None is ever lost."""
        ...
