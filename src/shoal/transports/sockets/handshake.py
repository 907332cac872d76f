"""Handshake: both ends of a connection prove that they know the run's token, without sending it.

    callee   a nonce
    caller   its hello, with a nonce of its own, and a proof
    callee   its hello, with its verdict, and a proof

A proof is an HMAC-SHA256, keyed with the token, over the dialled port, the other end's nonce and the hello. A
process that listens on a dead node's port learns nothing from it, and cannot replay it: another listener has
another port, another connection another nonce.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.errors import PeerLost
from shoal.transports.forks import close_on_fork
from shoal.transports.rendezvous import is_loopback
from shoal.transports.shared_memory.memory import NO_PROBE, SWITCH, MemoryProbe

NONCE_BYTES = 16

CALLING, WELCOME, STALE, CROSSED = range(4)
"""Verdicts. CALLING: in a caller's hello. WELCOME: accepted. STALE: a later incarnation of it is known.
CROSSED: the callee has dialled the caller as well, and that connection counts."""

HANDSHAKE_SECONDS = 5.0
"""How long a caller may take to prove that it belongs to the run."""

DEATH_SECONDS = 1.0
"""How long a peer whose memory is gone may take to disconnect: the kernel frees that first."""

MOST_UNVERIFIED = 64
"""Callers in the middle of a handshake; one more disconnects the one that has waited longest."""

_PROTOCOL = b"shoal/3\n"
_FIELDS = struct.Struct(f"<8sIHBiiQ{NONCE_BYTES}s")
HELLO_BYTES = _FIELDS.size + 32


class Hello(NamedTuple):
    """What each end of a connection says about itself."""

    protocol: bytes
    rank: int
    incarnation: int
    verdict: int
    pid: int  # 0: shares no memory
    fd: int  # open on a memory probe, which the other end tries to map
    serial: int
    nonce: bytes


@dataclass(frozen=True)
class Credentials:
    """A node's rank and incarnation, the run's token, and its memory probe."""

    rank: int
    size: int
    token: bytes = field(repr=False)
    incarnation: int = 0
    probe: MemoryProbe = field(default_factory=lambda: MemoryProbe(share=False))

    def hello(
        self, port: int, theirs: bytes, mine: bytes, verdict: int = CALLING, *, shares: bool = True
    ) -> bytes:
        """The hello for a connection to `port`, given the nonces of both ends."""
        where = self.probe.location if shares else NO_PROBE
        fields = _FIELDS.pack(_PROTOCOL, self.rank, self.incarnation, verdict, *where, mine)
        return fields + self._proof(port, theirs, fields)

    def read(self, data: bytes, port: int, mine: bytes) -> Hello | None:
        """The hello of the other end; None unless it proves knowledge of the token."""
        fields, proof = data[: _FIELDS.size], data[_FIELDS.size :]
        hello = Hello._make(_FIELDS.unpack(fields))
        is_proved = hmac.compare_digest(proof, self._proof(port, mine, fields))
        return hello if is_proved and hello.protocol == _PROTOCOL else None

    def _proof(self, port: int, nonce: bytes, fields: bytes) -> bytes:
        return hmac.digest(self.token, port.to_bytes(2, "little") + nonce + fields, "sha256")


class VerifiedSocket(NamedTuple):
    """A connection whose other end knows the token."""

    sock: socket.socket
    incarnation: int  # of the peer
    pid: int  # of the peer, if its memory can be mapped; else 0


@dataclass(eq=False)
class _Pending:
    """A connection in the middle of its handshake."""

    sock: socket.socket
    deadline: float
    port: int  # that was dialled
    dialled: int | None = None  # the rank that this node dialled; None for a caller
    incarnation: int = 0  # of the rank that was dialled
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    challenge: bytes = b""  # the nonce of the other end
    received: bytearray = field(default_factory=bytearray)

    @property
    def awaited(self) -> int:
        """Bytes of the next message from the other end: the callee begins with its nonce."""
        return NONCE_BYTES if self.dialled is not None and not self.challenge else HELLO_BYTES


def listen(host: str, size: int) -> socket.socket:
    """A listening socket for `size` nodes."""
    _require_loopback(host)
    return close_on_fork(socket.create_server((host, 0), backlog=size + 2 * MOST_UNVERIFIED))


class Handshaker:
    """Dials peers and accepts callers. Non-blocking: no connection can delay another.

    Accepts a caller that knows the token and whose incarnation is later than any known one of its rank.
    When two nodes dial each other at once, the connection of the higher rank counts.
    """

    def __init__(self, credentials: Credentials, listener: socket.socket) -> None:
        self.credentials = credentials
        self.verified: dict[int, VerifiedSocket] = {}
        self.unreachable: dict[int, str] = {}  # rank -> why; only a restarted node continues without some
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._known: dict[int, int] = {}  # rank -> latest accepted incarnation
        self._stop_receiver, self._stop_sender = map(close_on_fork, socket.socketpair())
        self._selector = close_on_fork(selectors.DefaultSelector())
        self._selector.register(self._stop_receiver, selectors.EVENT_READ)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def dial(self, peer: int, address: str, incarnation: int = 0) -> None:
        """Dial a peer, unless it is connected. Does not wait for its answer.

        Also handles what has arrived, because peers dialled earlier wait only briefly for our hello.
        """
        if peer in self.verified:
            return
        try:
            host, port = address.split()
            _require_loopback(host)
            sock = close_on_fork(socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS))
        except OSError as error:
            self._give_up(peer, f"node {peer} published {address} but does not answer there: {error}", error)
            return
        self._watch(_Pending(sock, float("inf"), int(port), peer, incarnation))
        self._process_events(time.monotonic())

    def await_all(self, deadline: float) -> None:
        """Run handshakes until every rank is connected or unreachable, or the deadline has passed."""
        while self.absent() and time.monotonic() < deadline:
            self._process_events(deadline)

    def absent(self) -> set[int]:
        """Ranks that are neither connected nor known to be unreachable."""
        return (
            set(range(self.credentials.size))
            - {self.credentials.rank}
            - self.verified.keys()
            - self.unreachable.keys()
        )

    def skip(self, peers: set[int], why: str) -> None:
        """Stop waiting for these peers."""
        for peer in peers:
            self.unreachable[peer] = f"node {peer} {why}"
            self._cancel_dial(peer)

    def take_verified(self) -> dict[int, VerifiedSocket]:
        """Hand the verified connections over to the caller."""
        verified, self.verified = self.verified, {}
        return verified

    def serve(self, admit: Callable[[int, VerifiedSocket], None]) -> None:
        """Pass each node that rejoins to `admit`, until `stop`; then stop listening."""
        try:
            while self._process_events(float("inf")):
                for peer, verified in self.take_verified().items():
                    admit(peer, verified)
        finally:
            self._shut()

    def stop(self) -> None:
        """Make `serve` return."""
        with contextlib.suppress(OSError):  # it has returned
            self._stop_sender.send(b".")

    def close(self) -> None:
        """Close the connections that were not handed over, and the probe."""
        self._shut()
        self._stop_sender.close()
        self.credentials.probe.retire()

    def _shut(self) -> None:
        if self._selector.get_map() is None:  # closed already
            return
        for pending in self._all_pending():
            pending.sock.close()
        for verified in self.verified.values():
            verified.sock.close()
        self._listener.close()
        self._stop_receiver.close()
        self._selector.close()

    def _process_events(self, deadline: float) -> bool:
        """Wait for the next event and handle it. False after `stop`."""
        next_event = min([deadline, *(pending.deadline for pending in self._all_pending())])
        seconds = None if next_event == float("inf") else max(0.0, next_event - time.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._stop_receiver:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._all_pending():  # not rejected meanwhile
                self._receive(key.data)
        for pending in self._all_pending():
            if pending.deadline <= time.monotonic():
                self._reject(pending)
        return True

    def _all_pending(self) -> list[_Pending]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _watch(self, pending: _Pending) -> None:
        pending.sock.setblocking(False)
        self._selector.register(pending.sock, selectors.EVENT_READ, pending)

    def _remove(self, pending: _Pending) -> None:
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it disconnected before its turn
            return
        except OSError:  # out of file descriptors: let some be closed
            time.sleep(0.01)
            return
        unverified = [pending for pending in self._all_pending() if pending.dialled is None]
        if len(unverified) >= MOST_UNVERIFIED:
            self._reject(min(unverified, key=lambda pending: pending.deadline))
        pending = _Pending(close_on_fork(sock), time.monotonic() + HANDSHAKE_SECONDS, self._port)
        self._watch(pending)
        self._send(pending, pending.nonce)

    def _send(self, pending: _Pending, data: bytes) -> None:
        """Send a few bytes, which always fit the socket's buffer; reject the peer if not."""
        try:
            pending.sock.sendall(data)
        except OSError as error:
            self._reject(pending, f"disconnects: {error}")

    def _receive(self, pending: _Pending) -> None:
        try:
            data = pending.sock.recv(pending.awaited - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending.received += data
        if not data:
            self._reject(pending)
        elif len(pending.received) == pending.awaited:
            self._handle(pending, bytes(pending.received))

    def _handle(self, pending: _Pending, data: bytes) -> None:
        """Handle a complete message of the handshake."""
        if len(data) == NONCE_BYTES:
            pending.challenge = data
            pending.received.clear()
            self._send(pending, self.credentials.hello(pending.port, pending.challenge, pending.nonce))
            return
        hello = self.credentials.read(data, pending.port, pending.nonce)
        if hello is None:
            self._reject(pending, "is another program: it does not know the run's token")
        elif pending.dialled is None:
            self._answer(pending, hello)
        else:
            self._handle_answer(pending, pending.dialled, hello)

    def _answer(self, pending: _Pending, hello: Hello) -> None:
        verdict = self._verdict(hello)
        if verdict is None:
            self._reject(pending)
            return
        pid = self.credentials.probe.sharing_pid(hello) if verdict == WELCOME else 0
        pending.sock.setblocking(True)
        with contextlib.suppress(OSError):  # the peer just died: its connection will show that
            answer = self.credentials.hello(
                pending.port, hello.nonce, pending.nonce, verdict, shares=pid != 0
            )
            pending.sock.sendall(answer)
        if verdict == WELCOME:
            self._cancel_dial(hello.rank)
            self._accept_peer(pending, hello, pid)
        else:
            self._remove(pending)

    def _verdict(self, hello: Hello) -> int | None:
        """The answer to a caller that knows the token; None to disconnect without one."""
        rank, incarnation = hello.rank, hello.incarnation
        if rank >= self.credentials.size or rank == self.credentials.rank or hello.verdict != CALLING:
            return None
        if incarnation == 0 and rank < self.credentials.rank:  # at first start higher ranks dial
            return None
        if incarnation <= self._known.get(rank, -1):
            return STALE
        ours = [pending for pending in self._all_pending() if pending.dialled == rank]
        if rank < self.credentials.rank and any(pending.incarnation >= incarnation for pending in ours):
            return CROSSED
        return WELCOME

    def _handle_answer(self, pending: _Pending, peer: int, hello: Hello) -> None:
        if hello.rank != peer or hello.verdict == CALLING:
            self._reject(pending)
        elif hello.verdict == CROSSED:
            self._remove(pending)  # its own connection is on the way
        elif hello.verdict == STALE:
            raise PeerLost(
                f"node {peer} knows a later incarnation of node {self.credentials.rank} than this one, "
                f"{self.credentials.incarnation}. Increase the incarnation with each restart."
            )
        else:
            pid = self.credentials.probe.sharing_pid(hello)
            if hello.pid and not pid:
                if _has_died(pending.sock):
                    self._reject(pending)
                    return
                raise PeerLost(
                    f"node {peer} can map memory of node {self.credentials.rank}, but not vice versa. "
                    f"Set {SWITCH}=0 on every node."
                )
            self._accept_peer(pending, hello, pid)

    def _accept_peer(self, pending: _Pending, hello: Hello, pid: int) -> None:
        self._selector.unregister(pending.sock)
        pending.sock.setblocking(True)
        if hello.rank in self.verified:  # restarted before the run began
            self.verified[hello.rank].sock.close()
        self._known[hello.rank] = hello.incarnation
        self.unreachable.pop(hello.rank, None)
        self.verified[hello.rank] = VerifiedSocket(pending.sock, hello.incarnation, pid)

    def _cancel_dial(self, peer: int) -> None:
        """Close a connection to `peer` that it has not answered yet."""
        for pending in self._all_pending():
            if pending.dialled == peer:
                self._remove(pending)

    def _reject(self, pending: _Pending, why: str = "") -> None:
        self._remove(pending)
        if pending.dialled is not None:
            how = why or f"disconnected from node {self.credentials.rank} before the run began"
            self._give_up(pending.dialled, f"node {pending.dialled} at port {pending.port} {how}")

    def _give_up(self, peer: int, why: str, error: OSError | None = None) -> None:
        if self.credentials.incarnation == 0:
            raise PeerLost(why) from error
        self.unreachable[peer] = why


def _has_died(sock: socket.socket) -> bool:
    """Whether the process at the other end disconnects, and says nothing before."""
    readable, _, _ = select.select([sock], [], [], DEATH_SECONDS)
    try:
        return bool(readable) and not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _require_loopback(host: str) -> None:
    if ":" in host or host == "localhost" or not is_loopback(host):
        raise ValueError(
            f"host {host} is not an IPv4 loopback address; frames are not encrypted, so sockets stay on "
            "127.0.0.1. Between hosts use the grpc transport."
        )
