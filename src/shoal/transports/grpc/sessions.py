"""Sessions: a hub's clients with their send queues and flow control, and what a node is told of its peers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import JOINED, LEFT, LOST, Message
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.grpc.control_pb2 import Peer
from shoal.transports.grpc.hub_protocol import BATCH_BYTES, LARGE, record
from shoal.transports.shared_memory.large_messages import LargeMessages


class PeerTracker:
    """Delivers messages, and notices when a peer's state changes: present, lost or left.

    LOST or LEFT comes once, JOINED only after one of them. The first arrival of a peer is not announced.
    Each session of a peer has a number, so that two sessions are never taken for one. `reasons` and
    `incarnations` are what this node has heard of its peers last.
    """

    def __init__(
        self, deliver: Callable[[Message], None], reasons: dict[int, str], incarnations: dict[int, int]
    ) -> None:
        self.deliver = deliver
        self._reasons = reasons
        self._incarnations = incarnations
        self._lock = threading.Lock()
        self._present: dict[int, tuple[int, int]] = {}  # peer -> incarnation and session number
        self._gone: set[int] = set()
        self._unread: Counter[int] = Counter()  # peer -> JOINED notices that the algorithm has not read
        self._contacted: set[int] = set()

    def expect_later(self, peers: Iterable[int]) -> None:
        """Nobody misses these peers, who are not there yet. When one comes, that is announced."""
        self._gone.update(peers)

    def is_reachable(self, peer: int) -> bool:
        """Whether a message to `peer` reaches the session that the algorithm knows.

        False while the algorithm has not read that the peer rejoined: its message is not meant for that one.
        """
        return peer not in self._gone and not self._unread[peer]

    def session_number_of(self, peer: int) -> int:
        """The session number of `peer`; 0 if it is not present."""
        return self._present.get(peer, (0, 0))[1]

    def note_contact(self, peer: int) -> None:
        """Record that messages are exchanged with `peer`."""
        self._contacted.add(peer)

    def joined(self, peer: int, incarnation: int, session_number: int = 0) -> None:
        """`peer` is present; delivers JOINED if it was gone, and LOST before if this is a new session."""
        with self._lock:
            known = self._present.get(peer)
            if known is not None and known != (incarnation, session_number):
                self._go(LOST, peer, "it joined again")
            if self._incarnations.get(peer, incarnation) != incarnation:
                self._go(LOST, peer, "it was restarted")  # while this node was cut off from it
            self._incarnations[peer] = incarnation
            self._present[peer] = incarnation, session_number
            if peer in self._gone:
                self._unread[peer] += 1
                self._gone.discard(peer)
                self.deliver(Message(JOINED, src=peer, incarnation=incarnation))

    def left(self, peer: int) -> None:
        """`peer` has closed its transport."""
        with self._lock:
            self._go(LEFT, peer, "")

    def lost(self, peer: int, reason: str) -> None:
        """`peer` is lost."""
        with self._lock:
            self._go(LOST, peer, reason)

    def cut_off(self, peer: int, reason: str) -> None:
        """`peer` is unreachable. Announced only if messages were exchanged with it."""
        with self._lock:
            if peer in self._contacted:
                self._go(LOST, peer, reason)
            self._present.pop(peer, None)

    def taken(self, m: Message) -> None:
        """The algorithm receives this message now."""
        if m.tag == JOINED:
            with self._lock:
                self._unread[m.src] -= 1

    def _go(self, tag: str, peer: int, reason: str) -> None:
        if peer in self._gone:
            return
        self._gone.add(peer)
        self._contacted.discard(peer)
        self._present.pop(peer, None)
        if tag == LOST:
            self._reasons[peer] = reason
        self.deliver(Message(tag, src=peer))


def _nothing() -> None:
    pass


class FlowControl:
    """Admits a limited number of bytes at a time, first come, first served. One message always fits."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._inside = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self._open = True

    def enter(self, nbytes: int, seconds: float) -> bool:
        """Wait for room. False if there was none in time, or after `close`."""
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
        """Admit nothing more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _may_enter(self, ticket: object, nbytes: int) -> bool:
        return self._queue[0] is ticket and (not self._inside or self._inside + nbytes <= self._most)


@dataclass
class QueuedRecord:
    """A record on its way to a client. `parts` is the body of a large message, fetched separately."""

    number: int
    kind: int
    body: bytes
    parts: Sequence[Tensor] = ()
    settle: Callable[[], None] = _nothing  # called once: on arrival, or if it never arrives


class SendQueue:
    """The records for one client, in order. Each stays until the client acknowledges it."""

    def __init__(self) -> None:
        self._queued: deque[QueuedRecord] = deque()
        self._last = 0
        self._open = True
        self._changed = threading.Condition()

    def put(
        self, kind: int, body: bytes, parts: Sequence[Tensor] = (), settle: Callable[[], None] = _nothing
    ) -> None:
        """Append a record; settled at once if the client is gone."""
        with self._changed:
            if self._open:
                self._last += 1
                self._queued.append(QueuedRecord(self._last, kind, body, parts, settle))
                self._changed.notify_all()
                return
        settle()

    def take(self, seconds: float) -> bytes:
        """The next records; waits for the first, and returns b"" if none comes or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or not self._open, seconds)
            batch, nbytes = [], 0
            for queued in self._queued:
                batch.append(record(queued.number, queued.kind, queued.body))
                nbytes += len(batch[-1])
                if queued.kind == LARGE or nbytes >= BATCH_BYTES:
                    break
        return b"".join(batch)

    def find(self, number: int) -> QueuedRecord | None:
        """The record with that number, unless acknowledged."""
        with self._changed:
            return next((queued for queued in self._queued if queued.number == number), None)

    def settle(self, received: int) -> None:
        """Settle all records up to this number: they have arrived."""
        with self._changed:
            done = []
            while self._queued and self._queued[0].number <= received:
                done.append(self._queued.popleft())
            self._changed.notify_all()
        for queued in done:
            queued.settle()

    def await_settled(self, seconds: float) -> bool:
        """Wait until the queue is empty or closed; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued or not self._open, max(0.0, seconds))

    def close(self) -> None:
        """The client is gone: settle all records, accept no more."""
        with self._changed:
            self._open = False
        self.settle(self._last)


@dataclass(eq=False)
class Session:
    """One session of a node at a hub, from joining until it is lost, leaves, or joins again.

    `members` is the lock of the hub. It guards what threads of several calls change.
    """

    rank: int
    incarnation: int
    nonce: bytes
    address: str
    large_messages: LargeMessages
    members: threading.Condition = field(default_factory=threading.Condition, repr=False)
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    number: int = field(default_factory=lambda: secrets.randbits(32))
    here: bool = True
    has_left: bool = False
    received: int = 0  # number of the last message from it
    queue: SendQueue = field(default_factory=SendQueue)
    calls: dict[Any, int] = field(default_factory=dict)  # gRPC contexts of the calls under way -> line
    line: int = 0  # how often it has replaced its connections
    last_seen: float = field(default_factory=time.monotonic)

    def ends_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the session; whether it has come."""
        with self.members:
            return self.members.wait_for(lambda: not self.here, seconds)

    def touch(self) -> None:
        """Record a sign of life."""
        self.last_seen = time.monotonic()

    def move_to(self, line: int) -> None:
        """It goes on with new connections; calls on earlier ones, which may hold room here, are cancelled."""
        with self.members:
            self.line = max(line, self.line)
            for call, its in tuple(self.calls.items()):
                if its < self.line:
                    call.cancel()

    def begin_call(self, call: Any, line: int) -> None:
        """A call begins on that line; a Move that comes from now on ends it if the line is an earlier one."""
        with self.members:
            self.calls[call] = line
            self.move_to(line)

    def end_call(self, call: Any) -> None:
        """The call has ended."""
        with self.members:
            self.calls.pop(call, None)

    def has_received(self, number: int) -> bool:
        """Whether a message came before, and is repeated on new connections as its receipt was lost.

        Raises WireError if another should have come before it.
        """
        if number == self.received + 1:
            return False
        if number == self.received and self.line:
            return True
        raise WireError(f"node {self.rank} sent message {number} after message {self.received}")

    def touch_each(self, pieces: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces, recording a sign of life with each."""
        for piece in pieces:
            self.touch()
            yield piece

    def seconds_left(self, began: float) -> float:
        """How long to wait for its answer to a goodbye sent at `began`."""
        return max(began, self.last_seen) + CLOSING_SECONDS - time.monotonic()

    def describe(self, state: Peer.State, reason: str = "") -> Peer:
        """This node as announced to others."""
        return Peer(
            rank=self.rank,
            state=state,
            incarnation=self.incarnation,
            session_number=self.number,
            reason=reason,
        )
