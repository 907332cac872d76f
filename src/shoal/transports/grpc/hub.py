"""Hub: the node that others call. It keeps the membership, and receives and forwards messages."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES, LEFT, Message
from shoal.transports.frames import BufferPool, MemoryLocation, Shape, bytes_of
from shoal.transports.grpc.control_pb2 import JoinReply, JoinRequest, Peer, Receipt, Roster
from shoal.transports.grpc.hub_protocol import (
    END,
    INLINE,
    INLINE_BYTES,
    LARGE,
    PEERS_CHANGED,
    READY,
    WAITING,
    Envelope,
    GrpcConfig,
    fill,
    size_of,
    slices,
)
from shoal.transports.grpc.sessions import FlowControl, PeerTracker, Session
from shoal.transports.shared_memory.large_messages import LargeMessages
from shoal.transports.shared_memory.memory import MemoryProbe

ROOM_BYTES = 16 << 20
"""Bytes of small messages that may wait at a hub, whatever the size of the model."""

Decode = Callable[[int, memoryview | bytes], tuple[Message, list[Shape]]]


class JoinRefused(Exception):
    """A node may not join; the text says why."""


class SessionEnded(Exception):
    """A call in a session that has ended."""


class Hub:
    """Sessions of the clients, their queues, and flow control.

    Bounded memory: of large messages to this node, and of those to forward, it holds no more bytes than one
    message may have; further senders wait. Messages in the sender's shared memory do not count. One lock
    guards the membership, so that all nodes hear of changes in one order.
    """

    def __init__(
        self,
        config: GrpcConfig,
        probe: MemoryProbe,
        tracker: PeerTracker,
        decode: Decode,
        wakeup: threading.Event,
    ) -> None:
        self._config = config
        self._probe = probe
        self._tracker = tracker
        self._decode = decode
        self._wakeup = wakeup  # set whenever a node joins
        self._buffers = BufferPool()
        self._members = threading.Condition()
        self._by_rank: dict[int, Session] = {}  # the latest session of each rank
        self._by_key: dict[str, Session] = {}
        self.has_started = False  # all nodes that are waited for have come
        self._closing = False
        large = max(config.limit_bytes + HEADER_BYTES, ROOM_BYTES)
        self._inbox = FlowControl(ROOM_BYTES), FlowControl(large)  # small, large messages to this node
        self._transit = FlowControl(ROOM_BYTES), FlowControl(large)  # to others
        self._unread: dict[int, Callable[[], None]] = {}  # id of a message in the inbox -> frees its room
        self._sending = FlowControl(ROOM_BYTES)  # small messages of this node to its clients
        self._over = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_sessions, name=f"shoal {config.rank} watch", daemon=True
        )
        self._watch.start()

    # -- membership ----------------------------------------------------------------------------

    def absent(self) -> set[int]:
        """The nodes that are waited for, and are not present."""
        with self._members:
            return {rank for rank in self._config.expects - self._config.late if not self._is_here(rank)}

    def present(self) -> set[int]:
        """The nodes that are present."""
        with self._members:
            return {session.rank for session in self._present()}

    def joined(self) -> set[int]:
        """The nodes that have joined at least once."""
        return set(self._by_rank)

    def start(self) -> None:
        """Start the run: send READY to all clients, and from now on announce changes."""
        with self._members:
            self.has_started = True
            for rank in sorted(self.absent()):
                self._tracker.lost(rank, f"it did not join within {self._config.timeout:g} s")
            for session in self._present():
                session.queue.put(READY, self._roster(session.rank))

    def join(self, request: JoinRequest, address: str) -> JoinReply:
        """Open a session for a node that joins, or joins again. Raises JoinRefused."""
        if objection := self._config.objection(request):
            raise JoinRefused(objection)
        large_messages = LargeMessages(self._probe.sharing_pid(request), self._config.limit_bytes)
        with self._members:
            if self._closing:
                raise JoinRefused(f"node {self._config.rank} is leaving")
            self._replace_session(request)
            who = request.rank, request.incarnation, request.nonce, address
            session = Session(*who, large_messages, self._members)
            if self.has_started:
                session.queue.put(READY, self._roster(session.rank))
                self._announce(session, Peer.HERE)
            self._by_rank[session.rank] = self._by_key[session.key] = session
            self._tracker.joined(session.rank, session.incarnation, session.number)
            if not self.has_started:
                absent = Roster(peers=[Peer(rank=rank) for rank in sorted(self.absent())]).SerializeToString()
                for other in self._present():
                    other.queue.put(WAITING, absent)
            self._wakeup.set()
        reply = JoinReply(session=session.key, incarnation=self._config.incarnation)
        if large_messages.pid:
            reply.pid, reply.fd, reply.serial = self._probe.location
        return reply

    def find(self, key: str) -> Session | None:
        """The session with that key, unless it has ended."""
        return self._by_key.get(key)

    def lose(self, session: Session, reason: str, line: int | None = None) -> None:
        """End a session whose node did not say goodbye; not if it has gone on to a later line than this."""
        with self._members:
            if session.here and line in (None, session.line):
                self._end(session)
                self._tracker.lost(session.rank, reason)
                self._announce(session, Peer.LOST, reason)

    def stop_joining(self) -> None:
        """Refuse joins, and discard messages to this node, so that no sender waits."""
        with self._members:
            self._closing = True

    def close(self) -> None:
        """Say goodbye; forward messages while two others need it; disconnect. A frozen client costs 5 s."""
        self.stop_joining()
        myself = Peer(rank=self._config.rank, state=Peer.LEFT, incarnation=self._config.incarnation)
        self._send_final(PEERS_CHANGED, Roster(peers=[myself]).SerializeToString())
        if self._config.rank == self._config.relay:
            with self._members:
                self._members.wait_for(
                    lambda: len(self._present(self._config.leaves)) < 2, self._config.timeout
                )
        self._send_final(END, b"")
        for flow in (*self._inbox, *self._transit, self._sending):
            flow.close()
        self.abandon()

    def abandon(self) -> None:
        """Disconnect without a goodbye."""
        self._over.set()
        self.stop_joining()
        with self._members:
            for session in self._present():
                self._end(session)
        self._watch.join()

    def _replace_session(self, request: JoinRequest) -> None:
        """End the earlier session of a node that joins. Raises JoinRefused for an earlier incarnation."""
        old = self._by_rank.get(request.rank)
        if old is None:
            return
        if request.incarnation < old.incarnation:
            raise JoinRefused(
                f"this is incarnation {request.incarnation} of node {request.rank}, "
                f"which was restarted as incarnation {old.incarnation}"
            )
        if old.here and request.incarnation == old.incarnation and request.nonce != old.nonce:
            raise JoinRefused(f"node {request.rank} has already joined, from {old.address}")
        self.lose(old, "it joined again")

    def _end(self, session: Session) -> None:
        session.here = False
        self._by_key.pop(session.key, None)
        session.queue.close()
        session.large_messages.close()
        for call in tuple(session.calls):
            call.cancel()
        self._members.notify_all()

    def _is_here(self, rank: int) -> bool:
        return rank in self._by_rank and self._by_rank[rank].here

    def _present(self, among: frozenset[int] | None = None) -> list[Session]:
        return [g for g in self._by_rank.values() if g.here and (among is None or g.rank in among)]

    def _announce(self, session: Session, state: Peer.State, reason: str = "") -> None:
        """Announce the state of a client to the nodes that have no connection to it."""
        leaves = self._config.leaves
        if not self.has_started or self._config.rank != self._config.relay or session.rank not in leaves:
            return
        peer = session.describe(state, reason)
        for other in self._present(leaves - {session.rank}):
            other.queue.put(PEERS_CHANGED, Roster(peers=[peer]).SerializeToString())

    def _roster(self, rank: int) -> bytes:
        """The states of the nodes to which this hub forwards messages of `rank`."""
        peers = []
        if self._config.rank == self._config.relay and rank in self._config.leaves:
            for other in sorted(self._config.leaves - {rank}):
                session = self._by_rank.get(other)
                if session is None:
                    peers.append(Peer(rank=other, state=Peer.LOST, reason="it has not joined"))
                else:
                    state = Peer.HERE if session.here else Peer.LEFT if session.has_left else Peer.LOST
                    peers.append(session.describe(state))
        return Roster(peers=peers).SerializeToString()

    def _send_final(self, kind: int, body: bytes) -> None:
        """Queue a last record for all clients and wait until those that are alive have received it."""
        with self._members:
            sessions = self._present()
            for session in sessions:
                session.queue.put(kind, body)
        began = time.monotonic()
        for session in sessions:
            while not session.queue.await_settled(seconds := session.seconds_left(began)):
                if seconds <= 0:
                    self.lose(session, "it did not acknowledge a goodbye")

    def _watch_sessions(self) -> None:
        """End sessions without a sign of life, even if their connections look intact."""
        pause = self._config.failure_timeout / 5
        before = time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            asleep = (
                now - before if now - before > 3 * pause else 0.0
            )  # this process was stopped: not the clients' fault
            before = now
            for session in tuple(self._by_rank.values()):
                session.last_seen += asleep
                if now - session.last_seen > self._config.silence_seconds:
                    self.lose(session, f"it gave no sign of life for {now - session.last_seen:.1f} s")

    # -- messages to clients -------------------------------------------------------------------

    def transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Queue a message of this node for a client. Waits until a large one has been fetched.

        A message in shared memory counts as small.
        """
        session = self._by_rank.get(dst)  # before is_reachable: a later one is of a later session
        if session is None or not self._tracker.is_reachable(dst):
            return
        header, parts = session.large_messages.wrap(header, parts)
        nbytes = len(header) + sum(part.nbytes for part in parts)
        if nbytes <= HEADER_BYTES + INLINE_BYTES:
            while not self._sending.enter(nbytes, self._config.failure_timeout):
                if not session.here:
                    return
            body = b"".join((header, *map(bytes_of, parts)))
            session.queue.put(INLINE, body, settle=lambda: self._sending.leave(nbytes))
            return
        settled = threading.Event()
        session.queue.put(LARGE, header, parts, settled.set)
        try:
            settled.wait()  # set at the latest when the client is lost
        except BaseException:
            self.lose(session, "sending to it was interrupted")  # the tensors may change now
            raise

    def poll(self, session: Session, received: int, maps: bool) -> bytes:
        """The next records for a client that has received `received`; b"" after the failure timeout."""
        if maps and not session.large_messages.pid:
            raise WireError(f"node {session.rank} claims to map memory, but none was agreed on")
        session.large_messages.is_mapped = maps
        session.queue.settle(received)
        records = session.queue.take(self._config.failure_timeout)
        if not session.here:
            raise SessionEnded
        return records

    def fetch(self, session: Session, number: int) -> Iterator[memoryview]:
        """The body of a large message in slices. Raises SessionEnded if the tensors may have changed."""
        queued = session.queue.find(number)
        if not session.here:
            raise SessionEnded
        if queued is None or queued.kind != LARGE:
            raise WireError(f"node {session.rank} fetches message {number}, which was not announced to it")
        for piece in itertools.chain(slices(queued.parts), (None,)):
            if not session.here:  # the sender may have changed it since
                raise SessionEnded
            session.touch()
            if piece is not None:
                yield piece

    # -- messages from clients -----------------------------------------------------------------

    def receive(self, session: Session, pieces: Iterator[bytes]) -> Receipt:
        """Receive one message of a client, to this node or to another."""
        envelope, rest = Envelope.open(next(pieces, b""))
        if session.has_received(envelope.number):
            return Receipt()
        header, location, rest = session.large_messages.open(envelope.header, rest)
        message, shapes = self._decode(session.rank, header)
        if message.tag == LEFT:
            self._handle_goodbye(session)
            return Receipt()
        follows = shapes if location is None else []
        flow, cost = self._flow_for(session, envelope.dst, follows, location)
        if not flow.enter(cost, self._config.failure_timeout):
            if self._over.is_set() or not session.here:
                raise SessionEnded
            return Receipt(busy=True)
        try:
            message.parts = fill(follows, session.touch_each(itertools.chain((rest,), pieces)), self._buffers)
            shared = None if location is None else (location, shapes)
            self._dispatch(session, envelope, message, shared, lambda: flow.leave(cost))
        except BaseException:
            flow.leave(cost)
            raise
        return Receipt()

    def taken(self, m: Message) -> None:
        """Free the room of a message that this node has taken out of its inbox."""
        if leave := self._unread.pop(id(m), None):
            leave()

    def _handle_goodbye(self, session: Session) -> None:
        with self._members:
            if session.here:
                session.has_left = True
                session.calls.clear()  # not cancelled: the goodbye is still to be answered
                self._end(session)
                self._tracker.left(session.rank)
                self._announce(session, Peer.LEFT)

    def _flow_for(
        self, session: Session, dst: int, follows: Sequence[Shape], location: MemoryLocation | None
    ) -> tuple[FlowControl, int]:
        """The flow control for a message, and the room it needs. Raises WireError if `dst` is invalid."""
        nbytes = size_of(follows)
        if dst != self._config.rank:
            leaves = self._config.leaves - {session.rank}
            if (
                location is not None
                or self._config.rank != self._config.relay
                or session.rank not in self._config.leaves
                or dst not in leaves
            ):
                raise WireError(
                    f"node {self._config.rank} does not forward from node {session.rank} to node {dst}"
                )
        flows = self._inbox if dst == self._config.rank else self._transit
        return flows[nbytes > INLINE_BYTES], HEADER_BYTES + nbytes

    def _dispatch(
        self,
        session: Session,
        envelope: Envelope,
        message: Message,
        shared: tuple[MemoryLocation, Sequence[Shape]] | None,
        leave: Callable[[], None],
    ) -> None:
        """Deliver or queue a complete message. Raises SessionEnded if its sender is gone."""
        is_large = message.nbytes > HEADER_BYTES + INLINE_BYTES
        parts = () if is_large or envelope.dst == self._config.rank else message.parts
        body = b"".join((envelope.header, *map(bytes_of, parts)))
        with self._members:
            if not session.here:
                raise SessionEnded
            if session.has_received(envelope.number):
                leave()
                return
            if shared is not None:  # read once: the end of what is read frees the sender's buffer
                message.parts = session.large_messages.read(*shared)
            session.received += 1
            target = self._by_rank.get(envelope.dst)
            if envelope.dst == self._config.rank and not self._closing:
                self._unread[id(message)] = leave
                self._tracker.deliver(message)
            elif target is None or not target.here or target.number != envelope.session_number:
                leave()
            elif is_large:
                target.queue.put(LARGE, body, message.parts, leave)
            else:
                target.queue.put(INLINE, body, settle=leave)
