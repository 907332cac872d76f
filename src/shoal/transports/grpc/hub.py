"""Hub: the node that others call. It knows who is here, and passes on what they say to each other."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES, LEFT, Message
from shoal.transports.arrivals import Arrivals
from shoal.transports.buffers import BufferPool
from shoal.transports.frames import Place, Shape, bytes_of
from shoal.transports.grpc.control_pb2 import Hello, Peer, Receipt, Roster, Welcome
from shoal.transports.grpc.guest import Gate, Guest
from shoal.transports.grpc.sharing import Sharing
from shoal.transports.grpc.terms import Terms
from shoal.transports.grpc.wire import (
    BULK,
    END,
    NEWS,
    READY,
    WAITING,
    WHOLE,
    WHOLE_BYTES,
    Envelope,
    fill,
    silence,
    size_of,
    slices,
)
from shoal.transports.memory import Probe

ROOM_BYTES = 16 << 20
"""Small messages that may wait at a hub, together, whatever the size of the model."""

Decode = Callable[[int, memoryview | bytes], tuple[Message, list[Shape]]]


class Refused(Exception):
    """A node that may not join; the text says why."""


class Ended(Exception):
    """A call of a node that is not here any more."""


class Hub:
    """Who is here, what waits for them, and how much is let in.

    Of large messages to this node, and of those it passes on, it holds only as much as one message may
    have; whoever sends more waits. What lies in memory of its sender does not count. One lock guards the
    membership, so that all hear of it in one order.
    """

    def __init__(
        self, terms: Terms, probe: Probe, arrivals: Arrivals, decode: Decode, stirred: threading.Event
    ) -> None:
        self._terms = terms
        self._probe = probe
        self._arrivals = arrivals
        self._decode = decode
        self._stirred = stirred  # set whenever somebody joins
        self._buffers = BufferPool()
        self._members = threading.Condition()
        self._guests: dict[int, Guest] = {}  # the last stay of each rank
        self._sessions: dict[str, Guest] = {}
        self._admitted = False
        self._closing = False
        large = max(terms.limit_bytes + HEADER_BYTES, ROOM_BYTES)
        self._inbox = Gate(ROOM_BYTES), Gate(large)  # small, large messages to this node
        self._transit = Gate(ROOM_BYTES), Gate(large)  # to others
        self._untaken: dict[int, Callable[[], None]] = {}  # id of a message in the inbox -> makes room again
        self._sending = Gate(ROOM_BYTES)  # small messages of this node to its guests
        self._over = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_guests, name=f"shoal {terms.rank} watch", daemon=True
        )
        self._watch.start()

    # -- who is here ---------------------------------------------------------------------------

    def absent(self) -> set[int]:
        """The nodes that are expected and not here."""
        with self._members:
            return {rank for rank in self._terms.expects if not self._is_here(rank)}

    def came(self) -> set[int]:
        """The nodes that have joined at least once."""
        return set(self._guests)

    def admit(self) -> None:
        """The run begins: tell those who are here, and from now on tell them of each other."""
        with self._members:
            self._admitted = True
            for rank in sorted(self.absent()):
                self._arrivals.lost(rank, f"it did not join within {self._terms.timeout:g} s")
            for guest in self._present():
                guest.outbox.put(READY, self._roster(guest.rank))

    def join(self, hello: Hello, address: str) -> Welcome:
        """Let a node in, or in again. Raises Refused."""
        if objection := self._terms.objection(hello):
            raise Refused(objection)
        sharing = Sharing(self._probe.sharing_pid(hello), self._terms.limit_bytes)
        with self._members:
            if self._closing:
                raise Refused(f"node {self._terms.rank} is leaving")
            self._make_way(hello)
            guest = Guest(hello.rank, hello.incarnation, hello.nonce, address, sharing)
            if self._admitted:
                guest.outbox.put(READY, self._roster(guest.rank))
                self._tell(guest, Peer.HERE)
            self._guests[guest.rank] = self._sessions[guest.session] = guest
            self._arrivals.came(guest.rank, guest.incarnation, guest.stay)
            if not self._admitted:
                absent = Roster(peers=[Peer(rank=rank) for rank in sorted(self.absent())]).SerializeToString()
                for other in self._present():
                    other.outbox.put(WAITING, absent)
            self._stirred.set()
        welcome = Welcome(session=guest.session, incarnation=self._terms.incarnation)
        if sharing.pid:
            welcome.pid, welcome.fd, welcome.serial = self._probe.where
        return welcome

    def find(self, session: str) -> Guest | None:
        """The guest with that session, if it is still here."""
        return self._sessions.get(session)

    def lose(self, guest: Guest, reason: str) -> None:
        """The guest is gone without a word; nothing more is accepted from this stay."""
        with self._members:
            if guest.here:
                self._part(guest)
                self._arrivals.lost(guest.rank, reason)
                self._tell(guest, Peer.LOST, reason)

    def shut(self) -> None:
        """Let nobody in any more; what comes for this node is thrown away, so that no sender waits for it."""
        with self._members:
            self._closing = True

    def close(self) -> None:
        """Say goodbye; pass messages on while two others may need it; hang up. A frozen guest costs 5 s."""
        self.shut()
        myself = Peer(rank=self._terms.rank, state=Peer.LEFT, incarnation=self._terms.incarnation)
        self._send_off(NEWS, Roster(peers=[myself]).SerializeToString())
        if self._terms.rank == self._terms.relay:
            with self._members:
                self._members.wait_for(
                    lambda: len(self._present(self._terms.leaves)) < 2, self._terms.timeout
                )
        self._send_off(END, b"")
        for gate in (*self._inbox, *self._transit, self._sending):
            gate.close()
        self.abandon()

    def abandon(self) -> None:
        """Hang up without a word."""
        self._over.set()
        self.shut()
        with self._members:
            for guest in self._present():
                self._part(guest)
        self._watch.join()

    def _make_way(self, hello: Hello) -> None:
        """End the earlier stay of a node that joins, if it is the same or a later one."""
        old = self._guests.get(hello.rank)
        if old is None:
            return
        if hello.incarnation < old.incarnation:
            raise Refused(
                f"this is incarnation {hello.incarnation} of node {hello.rank}, "
                f"which was started again as incarnation {old.incarnation}"
            )
        if old.here and hello.incarnation == old.incarnation and hello.nonce != old.nonce:
            raise Refused(f"node {hello.rank} is already here, from {old.address}")
        self.lose(old, "it joined again")

    def _part(self, guest: Guest) -> None:
        guest.here = False
        self._sessions.pop(guest.session, None)
        guest.outbox.close()
        guest.sharing.close()
        for call in tuple(guest.calls):
            call.cancel()
        self._members.notify_all()

    def _is_here(self, rank: int) -> bool:
        return rank in self._guests and self._guests[rank].here

    def _present(self, among: frozenset[int] | None = None) -> list[Guest]:
        return [g for g in self._guests.values() if g.here and (among is None or g.rank in among)]

    def _tell(self, guest: Guest, state: Peer.State, reason: str = "") -> None:
        """Let the nodes that have no line to this guest know how it is."""
        leaves = self._terms.leaves
        if not self._admitted or self._terms.rank != self._terms.relay or guest.rank not in leaves:
            return
        peer = guest.describe(state, reason)
        for other in self._present(leaves - {guest.rank}):
            other.outbox.put(NEWS, Roster(peers=[peer]).SerializeToString())

    def _roster(self, rank: int) -> bytes:
        """How those are to whom this hub passes messages on."""
        peers = []
        if self._terms.rank == self._terms.relay and rank in self._terms.leaves:
            for other in sorted(self._terms.leaves - {rank}):
                guest = self._guests.get(other)
                if guest is None:
                    peers.append(Peer(rank=other, state=Peer.LOST, reason="it has not come"))
                else:
                    state = Peer.HERE if guest.here else Peer.LEFT if guest.has_left else Peer.LOST
                    peers.append(guest.describe(state))
        return Roster(peers=peers).SerializeToString()

    def _send_off(self, kind: int, body: bytes) -> None:
        """Say a last word, and wait until all have heard it who still give signs of life."""
        with self._members:
            guests = self._present()
            for guest in guests:
                guest.outbox.put(kind, body)
        began = time.monotonic()
        for guest in guests:
            while not guest.outbox.await_settled(seconds := guest.seconds_left(began)):
                if seconds <= 0:
                    self.lose(guest, "it did not answer a goodbye")

    def _watch_guests(self) -> None:
        """Lose whoever gives no sign of life, however its connection looks."""
        pause = self._terms.failure_timeout / 5
        before = time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            asleep = now - before if now - before > 3 * pause else 0.0  # stopped itself: nobody's fault
            before = now
            for guest in tuple(self._guests.values()):
                guest.touched += asleep
                if now - guest.touched > silence(self._terms.failure_timeout):
                    self.lose(guest, f"it has been silent for {now - guest.touched:.1f} s")

    # -- messages down -------------------------------------------------------------------------

    def transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Put a message of this node into a guest's outbox. Waits until a large one has been fetched.

        One that lies in shared memory is a small one.
        """
        guest = self._guests.get(dst)  # before asking who is reachable: a later one is of a later stay
        if guest is None or not self._arrivals.is_reachable(dst):
            return
        header, parts = guest.sharing.wrap(header, parts)
        nbytes = len(header) + sum(part.nbytes for part in parts)
        if nbytes <= HEADER_BYTES + WHOLE_BYTES:
            while not self._sending.enter(nbytes, self._terms.failure_timeout):
                if not guest.here:
                    return
            body = b"".join((header, *map(bytes_of, parts)))
            guest.outbox.put(WHOLE, body, settle=lambda: self._sending.leave(nbytes))
            return
        settled = threading.Event()
        guest.outbox.put(BULK, header, parts, settled.set)
        try:
            settled.wait()  # ends at the latest when the guest is lost
        except BaseException:
            self.lose(guest, "sending to it was interrupted")  # for the tensors may change now
            raise

    def poll(self, guest: Guest, received: int, maps: bool) -> bytes:
        """The records that are next for a guest which has received so many; none if none comes within T."""
        if maps and not guest.sharing.pid:
            raise WireError(f"node {guest.rank} claims to map memory, but none was agreed on")
        guest.sharing.is_mapped = maps
        guest.outbox.settle(received)
        records = guest.outbox.take(self._terms.failure_timeout)
        if not guest.here:
            raise Ended
        return records

    def fetch(self, guest: Guest, number: int) -> Iterator[memoryview]:
        """The body of a large message in slices. Raises Ended rather than complete one that may be torn."""
        parcel = guest.outbox.find(number)
        if not guest.here:
            raise Ended
        if parcel is None or parcel.kind != BULK:
            raise WireError(f"node {guest.rank} wants message {number}, which it was not offered")
        for piece in itertools.chain(slices(parcel.parts), (None,)):
            if not guest.here:  # whoever sent it may have changed it since
                raise Ended
            guest.touch()
            if piece is not None:
                yield piece

    # -- messages up ---------------------------------------------------------------------------

    def receive(self, guest: Guest, pieces: Iterator[bytes]) -> Receipt:
        """Take in one message of a guest, for this node or for another one."""
        envelope, rest = Envelope.open(next(pieces, b""))
        if envelope.number != guest.received + 1:
            raise WireError(
                f"node {guest.rank} sent message {envelope.number} after message {guest.received}"
            )
        header, place, rest = guest.sharing.open(envelope.header, rest)
        message, shapes = self._decode(guest.rank, header)
        if message.tag == LEFT:
            self._let_go(guest)
            return Receipt()
        follows = shapes if place is None else []
        gate, cost = self._gate(guest, envelope.dst, follows, place)
        if not gate.enter(cost, self._terms.failure_timeout):
            if self._over.is_set() or not guest.here:
                raise Ended
            return Receipt(busy=True)
        try:
            message.parts = fill(follows, guest.touching(itertools.chain((rest,), pieces)), self._buffers)
            if place is not None:
                message.parts = self._unpack(guest, place, shapes)
            self._hand_over(guest, envelope, message, lambda: gate.leave(cost))
        except BaseException:
            gate.leave(cost)
            raise
        return Receipt()

    def taken(self, m: Message) -> None:
        """This node has taken a message out of its inbox: there is room for another one."""
        if leave := self._untaken.pop(id(m), None):
            leave()

    def _let_go(self, guest: Guest) -> None:
        with self._members:
            if guest.here:
                guest.has_left = True
                guest.calls.clear()  # they end by themselves, and the goodbye is still to be answered
                self._part(guest)
                self._arrivals.left(guest.rank)
                self._tell(guest, Peer.LEFT)

    def _unpack(self, guest: Guest, place: Place, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        with self._members:  # for when the guest goes, its memory is let go
            if not guest.here:
                raise Ended
            return guest.sharing.unpack(place, shapes)

    def _gate(
        self, guest: Guest, dst: int, follows: Sequence[Shape], place: Place | None
    ) -> tuple[Gate, int]:
        """Where a message waits for room, and how much it needs. Raises WireError if it leads nowhere."""
        nbytes = size_of(follows)
        if dst != self._terms.rank:
            leaves = self._terms.leaves - {guest.rank}
            if (
                place is not None
                or self._terms.rank != self._terms.relay
                or guest.rank not in self._terms.leaves
                or dst not in leaves
            ):
                raise WireError(
                    f"node {self._terms.rank} does not pass on from node {guest.rank} to node {dst}"
                )
        gates = self._inbox if dst == self._terms.rank else self._transit
        return gates[nbytes > WHOLE_BYTES], HEADER_BYTES + nbytes

    def _hand_over(
        self, guest: Guest, envelope: Envelope, message: Message, leave: Callable[[], None]
    ) -> None:
        """Put a whole message where it belongs, unless its sender is not here any more."""
        is_large = message.nbytes > HEADER_BYTES + WHOLE_BYTES
        parts = () if is_large or envelope.dst == self._terms.rank else message.parts
        body = b"".join((envelope.header, *map(bytes_of, parts)))
        with self._members:
            if not guest.here:
                raise Ended
            guest.received += 1
            target = self._guests.get(envelope.dst)
            if envelope.dst == self._terms.rank and not self._closing:
                self._untaken[id(message)] = leave
                self._arrivals.deliver(message)
            elif target is None or not target.here or target.stay != envelope.stay:
                leave()
            elif is_large:
                target.outbox.put(BULK, body, message.parts, leave)
            else:
                target.outbox.put(WHOLE, body, settle=leave)
