"""Spoke: a node's line to one hub. It listens there, and joins again whenever the hub was lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES, NOTICES
from shoal.transports import frames
from shoal.transports.arrivals import Arrivals
from shoal.transports.buffers import BufferPool
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.grpc.control_pb2 import Peer, Roster
from shoal.transports.grpc.line import Broken, Line
from shoal.transports.grpc.security import Security, split_address
from shoal.transports.grpc.terms import Terms
from shoal.transports.grpc.wire import BULK, END, NEWS, READY, WAITING, WHOLE, fill, open_records, size_of
from shoal.transports.memory import Probe

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach a hub."""

MOST_HANGUPS = 3
"""Times a hub may hang up in the middle of a handshake before that counts as its answer."""

REFUSALS = {
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "FAILED_PRECONDITION", "INVALID_ARGUMENT"),
}
"""What a hub answers to a node that it does not want."""

log = logging.getLogger("shoal")


class Spoke:
    """Keeps one line to a hub for as long as the node is there. `failure` is why it never came about."""

    def __init__(
        self,
        hub: int,
        terms: Terms,
        probe: Probe,
        security: Security,
        locate: Callable[[int], str | None],
        arrivals: Arrivals,
        stirred: threading.Event,
    ) -> None:
        self.hub = hub
        self.is_ready = False  # once: the hub has said that all are there
        self.failure: str | None = None
        self.absent = {hub}  # whom this line has to wait for, as far as is known
        self._terms = terms
        self._probe = probe
        self._security = security
        self._passwords = security.passwords(terms.run_id)
        self._locate = locate
        self._arrivals = arrivals
        self._stirred = stirred
        self._buffers = BufferPool()
        self._attempt: Line | None = None  # the line there is, ready or not
        self._line: Line | None = None  # the line that messages may use
        self._sending = threading.Lock()
        self._hub_leaves = False  # it has said goodbye, and may still pass on what others say
        self._hub_left = False
        self._hangups = 0
        self._logged = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal {terms.rank} to {hub}", daemon=True)
        self._thread.start()

    # -- from the node's own thread ------------------------------------------------------------

    def transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Bring a message to the hub; do nothing while the hub is lost."""
        with self._sending:
            line = self._line  # before asking who is reachable: a later one is of a later stay
            if line is None or not self._arrivals.is_reachable(dst):
                return
            try:
                if dst == self.hub:  # what it passes on may go to another host
                    header, parts = line.sharing.wrap(header, parts)
                line.send(dst, self._arrivals.stay_of(dst), header, parts)
            except Broken as error:
                line.cut(str(error))  # the thread that listens finds out and tells
            except BaseException:
                line.cut("sending to it was interrupted")
                raise

    def leave(self, goodbye: bytes, seconds: float) -> Any:
        """Tell the hub that this node leaves; the future of its being heard, None if nobody is there.

        From here on nothing joins again: other hubs may take longer to hear it.
        """
        if not self._sending.acquire(timeout=seconds):
            return None
        try:
            return None if self._line is None else self._line.leave(goodbye, seconds)
        except Broken:
            return None
        finally:
            self._closing.set()
            self._sending.release()

    def end(self) -> None:
        """Hang up."""
        self._closing.set()
        if self._hub_left:
            self._thread.join(CLOSING_SECONDS)  # it tells the hub just now that its last word was heard
        if self._attempt is not None:
            self._attempt.cut()
        self._thread.join()

    # -- from its own thread -------------------------------------------------------------------

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        while not self._closing.is_set():
            try:
                if self._call():
                    pause = SHORTEST_PAUSE
            except Exception as error:  # whatever it was: a silent end would be worse
                self._fail(f"node {self._terms.rank} cannot call node {self.hub}: {error}")
            if self._hub_left or self.failure is not None:
                return
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _call(self) -> bool:
        """Join the hub and listen to it until one of the two ends it; whether it let this node in."""
        address = self._locate(self.hub)
        if address is None:
            return False
        self._security.check_dialling(split_address(address)[0])
        line = self._attempt = Line(address, self._terms, self._probe, self._security, self._passwords)
        if self._closing.is_set():  # since we last looked
            line.cut()
        try:
            incarnation = line.join()
        except Broken as error:
            line.cut()
            self._judge(address, error)
            return False
        try:
            self._listen(line, incarnation)
        except Exception as error:
            self._line = None
            line.cut()
            self._lose(line.reason or str(error))
            if not isinstance(error, Broken | WireError):
                raise
        finally:
            line.sharing.close()
        return True

    def _judge(self, address: str, error: Broken) -> None:
        """Tell a hub that is not there yet from one that does not want us."""
        self._hangups = self._hangups + 1 if "Socket closed" in error.text else 0
        why = None
        if error.code in REFUSALS:
            why = error.text
        elif "handshake failed" in error.text:
            why = f"the two do not trust each other's certificates ({error.text})"
        elif self._hangups >= MOST_HANGUPS:
            why = "it hangs up during the handshake. Does it ask for TLS, or for a certificate of this node?"
        if why is not None and not self._closing.is_set():
            self._fail(f"node {self.hub} at {address} refused node {self._terms.rank}: {why}")

    def _fail(self, why: str) -> None:
        """The first time this ends the attempt to take part. Later it may pass: another hub may come."""
        if self._closing.is_set():
            return
        if self.is_ready:
            if why != self._logged:
                log.warning("%s", why)
            self._logged = why
        else:
            self.failure = why
            self._stirred.set()

    def _lose(self, reason: str) -> None:
        self._hub_left = self._hub_leaves
        if self.is_ready and not self._closing.is_set():
            self._arrivals.lost(self.hub, reason)
            self._cut_off(f"node {self.hub}, which passes its messages on, is lost")

    def _cut_off(self, reason: str) -> None:
        if self.hub == self._terms.relay:
            for peer in sorted(self._terms.leaves - {self._terms.rank}):
                self._arrivals.cut_off(peer, reason)

    def _listen(self, line: Line, incarnation: int) -> None:
        received = 0
        while True:
            for number, kind, body in open_records(line.poll(received)):
                if number != received + 1:
                    raise WireError(f"record {number} came after record {received}")
                if kind == END:
                    self._hang_up(line, number)
                    return
                self._take(line, incarnation, number, kind, body)
                received = number

    def _hang_up(self, line: Line, received: int) -> None:
        self._line = None
        self._hub_left = True
        with contextlib.suppress(Broken):
            line.poll(received)  # the hub waits to hear that its last word was heard
        line.cut()
        self._cut_off(f"node {self.hub}, which passed its messages on, has left")

    def _take(self, line: Line, incarnation: int, number: int, kind: int, body: memoryview) -> None:
        if kind in (WHOLE, BULK):
            self._take_message(line, number, kind, body)
        elif kind == WAITING:
            self.absent = {peer.rank for peer in _roster(body)} or {self.hub}
        elif kind == READY:
            self._line = line
            self._arrivals.came(self.hub, incarnation)
            self._note(_roster(body))
            self.absent = set()
            self.is_ready = True
            self._stirred.set()
        elif kind == NEWS:
            self._note(_roster(body))
        else:
            raise WireError(f"node {self.hub} sent a record of unknown kind {kind}")

    def _take_message(self, line: Line, number: int, kind: int, body: memoryview) -> None:
        header, place, rest = line.sharing.open(body[:HEADER_BYTES], body[HEADER_BYTES:])
        message, shapes = frames.decode(header, self._terms.limit_bytes)
        if message.src != self.hub:
            if (
                place is not None
                or self.hub != self._terms.relay
                or message.src not in self._terms.leaves - {self._terms.rank}
            ):
                raise WireError(f"node {self.hub} passed on a message of node {message.src}")
            self._arrivals.acquaint(message.src)
        if message.tag in NOTICES:
            raise WireError(f"node {self.hub} sent a message '{message.tag}'")
        if place is not None:
            message.parts = line.sharing.unpack(place, shapes)
        else:
            pieces: Iterable[bytes | memoryview] = (rest,)
            if kind == BULK:
                pieces = line.fetch(number, size_of(shapes))
            message.parts = fill(shapes, pieces, self._buffers)
        self._arrivals.deliver(message)

    def _note(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            if peer.state == Peer.HERE:
                self._arrivals.came(peer.rank, peer.incarnation, peer.stay)
            elif peer.state == Peer.LEFT:
                self._hub_leaves = self._hub_leaves or peer.rank == self.hub
                self._arrivals.left(peer.rank)
            else:
                self._arrivals.lost(peer.rank, peer.reason or f"node {self.hub} has lost it")


def _roster(body: memoryview) -> Sequence[Peer]:
    try:
        return Roster.FromString(bytes(body)).peers
    except DecodeError as error:
        raise WireError(f"not a Roster: {error}") from error
