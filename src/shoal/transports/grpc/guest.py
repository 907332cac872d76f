"""Guest: a node that has joined a hub, what waits for it there, and how much a hub takes in at a time."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.grpc.control_pb2 import Peer
from shoal.transports.grpc.sharing import Sharing
from shoal.transports.grpc.wire import BATCH_BYTES, BULK, record


def _nothing() -> None:
    pass


class Gate:
    """Lets so many bytes in at a time, first come, first served. A single message may always enter."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._inside = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self._open = True

    def enter(self, nbytes: int, seconds: float) -> bool:
        """Wait for room. False if there was none in time, or the gate was closed."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: not self._open or self._may_enter(ticket, nbytes), seconds)
                admitted = self._open and self._may_enter(ticket, nbytes)
                if admitted:
                    self._inside += nbytes
                return admitted
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def leave(self, nbytes: int) -> None:
        """Make room again."""
        with self._changed:
            self._inside -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _may_enter(self, ticket: object, nbytes: int) -> bool:
        return self._queue[0] is ticket and (not self._inside or self._inside + nbytes <= self._most)


@dataclass
class Parcel:
    """Something on its way to a guest. `parts` are the body of a message that is fetched apart."""

    number: int
    kind: int
    body: bytes
    parts: Sequence[Tensor] = ()
    settle: Callable[[], None] = _nothing  # called once, when it has arrived or never will


class Outbox:
    """What waits for one guest, in order. A parcel stays until the guest says that it has arrived."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self._last = 0
        self._open = True
        self._changed = threading.Condition()

    def put(
        self, kind: int, body: bytes, parts: Sequence[Tensor] = (), settle: Callable[[], None] = _nothing
    ) -> None:
        """Append a parcel. If the guest is gone it is settled at once."""
        with self._changed:
            if self._open:
                self._last += 1
                self._parcels.append(Parcel(self._last, kind, body, parts, settle))
                self._changed.notify_all()
                return
        settle()

    def take(self, seconds: float) -> bytes:
        """The records that are next, waiting for the first of them; nothing if none came, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._parcels or not self._open, seconds)
            batch, nbytes = [], 0
            for parcel in self._parcels:
                batch.append(record(parcel.number, parcel.kind, parcel.body))
                nbytes += len(batch[-1])
                if parcel.kind == BULK or nbytes >= BATCH_BYTES:
                    break
        return b"".join(batch)

    def find(self, number: int) -> Parcel | None:
        """The parcel with that number, if it is still here."""
        with self._changed:
            return next((parcel for parcel in self._parcels if parcel.number == number), None)

    def settle(self, received: int) -> None:
        """All up to this number have arrived."""
        with self._changed:
            done = []
            while self._parcels and self._parcels[0].number <= received:
                done.append(self._parcels.popleft())
            self._changed.notify_all()
        for parcel in done:
            parcel.settle()

    def await_settled(self, seconds: float) -> bool:
        """Wait until nothing is left, or nothing more can arrive; whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._parcels or not self._open, max(0.0, seconds))

    def close(self) -> None:
        """The guest is gone: settle all that waits, accept nothing more."""
        with self._changed:
            self._open = False
        self.settle(self._last)


@dataclass(eq=False)
class Guest:
    """One stay of a node at a hub, from its joining until it is lost, leaves, or joins anew."""

    rank: int
    incarnation: int
    nonce: bytes
    address: str
    sharing: Sharing
    session: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    stay: int = field(default_factory=lambda: secrets.randbits(32))
    here: bool = True
    has_left: bool = False
    received: int = 0  # number of the last message it sent
    outbox: Outbox = field(default_factory=Outbox)
    calls: set[Any] = field(default_factory=set)  # under way
    touched: float = field(default_factory=time.monotonic)

    def touch(self) -> None:
        """Take note of a sign of life."""
        self.touched = time.monotonic()

    def touching(self, pieces: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The same pieces; each that comes is a sign of life."""
        for piece in pieces:
            self.touch()
            yield piece

    def seconds_left(self, began: float) -> float:
        """How long to wait for its answer to a goodbye that was said then."""
        return max(began, self.touched) + CLOSING_SECONDS - time.monotonic()

    def describe(self, state: Peer.State, reason: str = "") -> Peer:
        """How others are told of it."""
        return Peer(rank=self.rank, state=state, incarnation=self.incarnation, stay=self.stay, reason=reason)
