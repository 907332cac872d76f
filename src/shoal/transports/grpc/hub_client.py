"""HubClient: a node's session at one hub. It polls for messages, and joins again after losing the hub."""

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
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.frames import BufferPool
from shoal.transports.grpc.calls import CallFailed, HubCalls
from shoal.transports.grpc.control_pb2 import Peer, Roster
from shoal.transports.grpc.hub_protocol import (
    END,
    INLINE,
    LARGE,
    PEERS_CHANGED,
    READY,
    WAITING,
    GrpcConfig,
    fill,
    open_records,
    size_of,
)
from shoal.transports.grpc.security import Security, split_address
from shoal.transports.grpc.sessions import PeerTracker
from shoal.transports.shared_memory.memory import MemoryProbe

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to join a hub."""

MOST_DISCONNECTS = 3
"""Times a hub may disconnect during the handshake before that counts as a refusal."""

REFUSALS = {
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "FAILED_PRECONDITION", "INVALID_ARGUMENT"),
}
"""Status codes with which a hub refuses a node."""

log = logging.getLogger("shoal")


class HubClient:
    """Keeps one session at a hub until the node closes. `failure` says why the first join failed."""

    def __init__(
        self,
        hub: int,
        config: GrpcConfig,
        probe: MemoryProbe,
        security: Security,
        locate: Callable[[int], str | None],
        tracker: PeerTracker,
        wakeup: threading.Event,
    ) -> None:
        self.hub = hub
        self.is_ready = False  # the hub has reported once that all nodes have joined
        self.failure: str | None = None
        self.absent = {hub}  # the nodes that have not joined, as far as is known
        self._config = config
        self._probe = probe
        self._security = security
        self._passwords = security.passwords(config.run_id)
        self._locate = locate
        self._tracker = tracker
        self._wakeup = wakeup
        self._buffers = BufferPool()
        self._attempt: HubCalls | None = None  # of the latest attempt, ready or not
        self._calls: HubCalls | None = None  # of the session that messages may use
        self._sending = threading.Lock()
        self._hub_leaving = False  # it has said goodbye, and may still forward messages
        self._hub_left = False
        self._disconnects = 0
        self._logged = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal {config.rank} to {hub}", daemon=True)
        self._thread.start()

    # -- called by the node -------------------------------------------------------------------

    def transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Send a message to the hub; do nothing while the hub is lost."""
        with self._sending:
            calls = self._calls  # before is_reachable: a later one is of a later session
            if calls is None or not self._tracker.is_reachable(dst):
                return
            try:
                if dst == self.hub:  # forwarded messages may go to another host
                    header, parts = calls.large_messages.wrap(header, parts)
                calls.send(dst, self._tracker.session_number_of(dst), header, parts)
            except CallFailed as error:
                calls.cut(self._why(error))  # the polling thread notices and announces it
            except BaseException:
                calls.cut("sending to it was interrupted")
                raise

    def leave(self, goodbye: bytes, seconds: float) -> Any:
        """Say goodbye to the hub; returns the future of its receipt, None without a session.

        The client does not join again after this: other hubs may take longer to hear it.
        """
        if not self._sending.acquire(timeout=seconds):
            return None
        try:
            return None if self._calls is None else self._calls.leave(goodbye, seconds)
        except CallFailed:
            return None
        finally:
            self._closing.set()
            self._sending.release()

    def end(self) -> None:
        """End the session."""
        self._closing.set()
        if self._hub_left:
            self._thread.join(CLOSING_SECONDS)  # it is acknowledging the hub's last record
        if self._attempt is not None:
            self._attempt.cut()
        self._thread.join()

    # -- the polling thread --------------------------------------------------------------------

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        while not self._closing.is_set():
            try:
                if self._call():
                    pause = SHORTEST_PAUSE
            except Exception as error:  # any error: a silent end would be worse
                self._fail(f"node {self._config.rank} cannot call node {self.hub}: {error}")
            if self._hub_left or self.failure is not None:
                return
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _call(self) -> bool:
        """Join the hub and poll until either end stops; whether the hub admitted this node."""
        address = self._locate(self.hub)
        if address is None:
            return False
        self._security.check_dialling(split_address(address)[0])
        calls = self._attempt = HubCalls(address, self._config, self._probe, self._security, self._passwords)
        if self._closing.is_set():  # since the last check
            calls.cut()
        try:
            incarnation = calls.join()
        except CallFailed as error:
            calls.cut()
            self._check_refusal(address, error)
            return False
        try:
            self._listen(calls, incarnation)
        except Exception as error:
            self._calls = None
            calls.cut()
            self._lose(calls.reason or self._why(error))
            if not isinstance(error, CallFailed | WireError):
                raise
        finally:
            calls.cut()
            calls.end()
        return True

    def _why(self, error: Exception) -> str:
        """Why a hub is lost, for people."""
        if isinstance(error, CallFailed) and error.code == "DEADLINE_EXCEEDED":
            seconds = self._config.silence_seconds
            return f"it gave no sign of life for {seconds:g} s: is it frozen, or the network down?"
        return str(error)

    def _check_refusal(self, address: str, error: CallFailed) -> None:
        """Distinguish a hub that is not up yet from one that refuses this node."""
        self._disconnects = self._disconnects + 1 if "Socket closed" in error.text else 0
        why = None
        if error.code in REFUSALS:
            why = error.text
        elif "handshake failed" in error.text:
            why = f"one end does not trust the other's certificate ({error.text})"
        elif self._disconnects >= MOST_DISCONNECTS:
            why = "it disconnects during the handshake. Does it require TLS, or a certificate of this node?"
        if why is not None and not self._closing.is_set():
            self._fail(f"node {self.hub} at {address} refused node {self._config.rank}: {why}")

    def _fail(self, why: str) -> None:
        """Before the first session this ends `connect`. Later it may pass: the hub may be restarted."""
        if self._closing.is_set():
            return
        if self.is_ready:
            if why != self._logged:
                log.warning("%s", why)
            self._logged = why
        else:
            self.failure = why
            self._wakeup.set()

    def _lose(self, reason: str) -> None:
        self._hub_left = self._hub_leaving
        if self.is_ready and not self._closing.is_set():
            self._tracker.lost(self.hub, reason)
            self._cut_off(f"node {self.hub}, which forwards its messages, is lost")

    def _cut_off(self, reason: str) -> None:
        if self.hub == self._config.relay:
            for peer in sorted(self._config.leaves - {self._config.rank}):
                self._tracker.cut_off(peer, reason)

    def _listen(self, calls: HubCalls, incarnation: int) -> None:
        received = 0
        while True:
            for number, kind, body in open_records(calls.poll(received)):
                if number != received + 1:
                    raise WireError(f"record {number} came after record {received}")
                if kind == END:
                    self._end_session(calls, number)
                    return
                self._take(calls, incarnation, number, kind, body)
                received = number

    def _end_session(self, calls: HubCalls, received: int) -> None:
        self._calls = None
        self._hub_left = True
        with contextlib.suppress(CallFailed):
            calls.acknowledge(received)  # the hub waits for it
        calls.cut()
        self._cut_off(f"node {self.hub}, which forwarded its messages, has left")

    def _take(self, calls: HubCalls, incarnation: int, number: int, kind: int, body: memoryview) -> None:
        if kind in (INLINE, LARGE):
            self._take_message(calls, number, kind, body)
        elif kind == WAITING:
            self.absent = {peer.rank for peer in _roster(body)} or {self.hub}
        elif kind == READY:
            self._calls = calls
            self._tracker.joined(self.hub, incarnation)
            self._note(_roster(body))
            self.absent = set()
            self.is_ready = True
            self._wakeup.set()
        elif kind == PEERS_CHANGED:
            self._note(_roster(body))
        else:
            raise WireError(f"node {self.hub} sent a record of unknown kind {kind}")

    def _take_message(self, calls: HubCalls, number: int, kind: int, body: memoryview) -> None:
        header, location, rest = calls.large_messages.open(body[:HEADER_BYTES], body[HEADER_BYTES:])
        message, shapes = frames.decode(header, self._config.limit_bytes)
        if message.src != self.hub:
            if (
                location is not None
                or self.hub != self._config.relay
                or message.src not in self._config.leaves - {self._config.rank}
            ):
                raise WireError(f"node {self.hub} forwarded a message of node {message.src}")
            self._tracker.note_contact(message.src)
        if message.tag in NOTICES:
            raise WireError(f"node {self.hub} sent a message '{message.tag}'")
        if location is not None:
            message.parts = calls.large_messages.read(location, shapes)
        else:
            pieces: Iterable[bytes | memoryview] = (rest,)
            if kind == LARGE:
                pieces = calls.fetch(number, size_of(shapes))
            message.parts = fill(shapes, pieces, self._buffers)
        self._tracker.deliver(message)

    def _note(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            if peer.state == Peer.HERE:
                self._tracker.joined(peer.rank, peer.incarnation, peer.session_number)
            elif peer.state == Peer.LEFT:
                self._hub_leaving = self._hub_leaving or peer.rank == self.hub
                self._tracker.left(peer.rank)
            else:
                self._tracker.lost(peer.rank, peer.reason or f"node {self.hub} has lost it")


def _roster(body: memoryview) -> Sequence[Peer]:
    try:
        return Roster.FromString(bytes(body)).peers
    except DecodeError as error:
        raise WireError(f"not a Roster: {error}") from error
