"""Lobby: where the connections of a node wait until they have shown that they belong to the run."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.errors import PeerLost
from shoal.transports.cards import (
    CALLING,
    CROSSED,
    HELLO_BYTES,
    NONCE_BYTES,
    STALE,
    WELCOME,
    Card,
    Hello,
)
from shoal.transports.forks import own
from shoal.transports.loopback import require_loopback
from shoal.transports.memory import SWITCH

HELLO_SECONDS = 5.0
"""How long a stranger may take to prove that it belongs to the run."""

MOST_STRANGERS = 64
"""Beyond so many at once the one that has waited longest must go."""


class Contact(NamedTuple):
    """A connection that was recognised."""

    sock: socket.socket
    incarnation: int  # of the peer
    pid: int  # of the process whose memory can be mapped; 0 if it cannot


@dataclass(eq=False)
class _Guest:
    """A connection whose other end has not proved yet that it knows the token."""

    sock: socket.socket
    deadline: float
    port: int  # that was called
    dialled: int | None = None  # the rank we called; None if it called us
    incarnation: int = 0  # which we called
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    challenge: bytes = b""  # the nonce of the other end
    heard: bytearray = field(default_factory=bytearray)

    @property
    def awaited(self) -> int:
        """Bytes of what it says next: who is called begins with its nonce."""
        return NONCE_BYTES if self.dialled is not None and not self.challenge else HELLO_BYTES


def listen(host: str, size: int) -> socket.socket:
    """A listening socket for the calls of `size` nodes."""
    require_loopback(host)
    return own(socket.create_server((host, 0), backlog=size + 2 * MOST_STRANGERS))


class Lobby:
    """Calls others, and lets in who calls; nobody in it can hold up anybody else.

    A caller comes in if it knows the token and is of a later incarnation than any of its rank before.
    When two nodes call each other at once, the call of the higher rank counts.
    """

    def __init__(self, card: Card, listener: socket.socket) -> None:
        self.card = card
        self.joined: dict[int, Contact] = {}
        self.unreachable: dict[int, str] = {}  # rank -> why; only a node that comes back goes on without
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._known: dict[int, int] = {}  # rank -> latest incarnation that was let in
        self._ending, self._end = map(own, socket.socketpair())
        self._selector = own(selectors.DefaultSelector())
        self._selector.register(self._ending, selectors.EVENT_READ)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def dial(self, peer: int, address: str, incarnation: int = 0) -> None:
        """Call a peer, unless it has called us; its answer comes when it gets to it.

        Sees to what has come meanwhile: whoever was called before waits for our hello, but not for long.
        """
        if peer in self.joined:
            return
        try:
            host, port = address.split()
            require_loopback(host)
            sock = own(socket.create_connection((host, int(port)), timeout=HELLO_SECONDS))
        except OSError as error:
            self._give_up(peer, f"node {peer} published {address} but does not answer there: {error}", error)
            return
        self._seat(_Guest(sock, float("inf"), int(port), peer, incarnation))
        self._attend(time.monotonic())

    def await_all(self, deadline: float) -> None:
        """Let guests in until all ranks have joined or are known to be unreachable, or the time is over."""
        while self.absent() and time.monotonic() < deadline:
            self._attend(deadline)

    def absent(self) -> set[int]:
        """Ranks that have neither joined nor are known to be unreachable."""
        return set(range(self.card.size)) - {self.card.rank} - self.joined.keys() - self.unreachable.keys()

    def go_on_without(self, peers: set[int], why: str) -> None:
        """Stop waiting for the answers of these."""
        for peer in peers:
            self.unreachable[peer] = f"node {peer} {why}"
            self._hang_up_on(peer)

    def dismiss(self) -> dict[int, Contact]:
        """Hand the connections that were recognised over to the caller."""
        joined, self.joined = self.joined, {}
        return joined

    def serve(self, admit: Callable[[int, Contact], None]) -> None:
        """Let in who comes back, until `end`; then shut the door."""
        try:
            while self._attend(float("inf")):
                for peer, contact in self.dismiss().items():
                    admit(peer, contact)
        finally:
            self._shut()

    def end(self) -> None:
        """Have `serve` return."""
        with contextlib.suppress(OSError):  # it has ended
            self._end.send(b".")

    def close(self) -> None:
        """Close whatever was not handed over, and the probe, which who was let in may not have tried yet."""
        self._shut()
        self._end.close()
        self.card.probe.retire()

    def _shut(self) -> None:
        if self._selector.get_map() is None:  # it is shut
            return
        for guest in self._guests():
            guest.sock.close()
        for contact in self.joined.values():
            contact.sock.close()
        self._listener.close()
        self._ending.close()
        self._selector.close()

    def _attend(self, deadline: float) -> bool:
        """Wait for something to happen, and see to it. False when this is to end."""
        next_event = min([deadline, *(guest.deadline for guest in self._guests())])
        seconds = None if next_event == float("inf") else max(0.0, next_event - time.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._ending:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._guests():  # not sent away meanwhile
                self._hear(key.data)
        for guest in self._guests():
            if guest.deadline <= time.monotonic():
                self._turn_away(guest)
        return True

    def _guests(self) -> list[_Guest]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _seat(self, guest: _Guest) -> None:
        guest.sock.setblocking(False)
        self._selector.register(guest.sock, selectors.EVENT_READ, guest)

    def _remove(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        guest.sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it hung up before its turn
            return
        except OSError:  # no file is left: let some be closed
            time.sleep(0.01)
            return
        strangers = [guest for guest in self._guests() if guest.dialled is None]
        if len(strangers) >= MOST_STRANGERS:
            self._turn_away(min(strangers, key=lambda guest: guest.deadline))
        guest = _Guest(own(sock), time.monotonic() + HELLO_SECONDS, self._port)
        self._seat(guest)
        self._say(guest, guest.nonce)

    def _say(self, guest: _Guest, words: bytes) -> None:
        """So little always fits; if not, it is a stranger that plays for time."""
        try:
            guest.sock.sendall(words)
        except OSError as error:
            self._turn_away(guest, f"hangs up: {error}")

    def _hear(self, guest: _Guest) -> None:
        try:
            said = guest.sock.recv(guest.awaited - len(guest.heard))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.heard += said
        if not said:
            self._turn_away(guest)
        elif len(guest.heard) == guest.awaited:
            self._take(guest, bytes(guest.heard))

    def _take(self, guest: _Guest, said: bytes) -> None:
        """All that was awaited of a guest has come."""
        if len(said) == NONCE_BYTES:
            guest.challenge = said
            guest.heard.clear()
            self._say(guest, self.card.hello(guest.port, guest.challenge, guest.nonce))
            return
        hello = self.card.read(said, guest.port, guest.nonce)
        if hello is None:
            self._turn_away(guest, "is somebody else, who does not know the token")
        elif guest.dialled is None:
            self._answer(guest, hello)
        else:
            self._hear_answer(guest, guest.dialled, hello)

    def _answer(self, guest: _Guest, hello: Hello) -> None:
        verdict = self._verdict(hello)
        if verdict is None:
            self._turn_away(guest)
            return
        pid = self.card.probe.sharing_pid(hello) if verdict == WELCOME else 0
        guest.sock.setblocking(True)
        with contextlib.suppress(OSError):  # died just now: the transport will say so
            answer = self.card.hello(guest.port, hello.nonce, guest.nonce, verdict, shares=pid != 0)
            guest.sock.sendall(answer)
        if verdict == WELCOME:
            self._hang_up_on(hello.rank)
            self._let_in(guest, hello, pid)
        else:
            self._remove(guest)

    def _verdict(self, hello: Hello) -> int | None:
        """What to tell a caller who knows the token; None if it has no business here."""
        rank, incarnation = hello.rank, hello.incarnation
        if rank >= self.card.size or rank == self.card.rank or hello.verdict != CALLING:
            return None
        if incarnation == 0 and rank < self.card.rank:  # in the beginning higher ranks call lower ones
            return None
        if incarnation <= self._known.get(rank, -1):
            return STALE
        ours = [guest for guest in self._guests() if guest.dialled == rank]
        if rank < self.card.rank and any(guest.incarnation >= incarnation for guest in ours):
            return CROSSED
        return WELCOME

    def _hear_answer(self, guest: _Guest, peer: int, hello: Hello) -> None:
        if hello.rank != peer or hello.verdict == CALLING:
            self._turn_away(guest)
        elif hello.verdict == CROSSED:
            self._remove(guest)  # its own call is on the way
        elif hello.verdict == STALE:
            raise PeerLost(
                f"node {peer} knows a later start of node {self.card.rank} than this one, which is number "
                f"{self.card.incarnation}; whoever starts a node again counts up its incarnation"
            )
        else:
            pid = self.card.probe.sharing_pid(hello)
            if hello.pid and not pid:
                raise PeerLost(
                    f"node {peer} can map memory of node {self.card.rank}, but not the other way round. "
                    f"Set {SWITCH}=0 for all."
                )
            self._let_in(guest, hello, pid)

    def _let_in(self, guest: _Guest, hello: Hello, pid: int) -> None:
        self._selector.unregister(guest.sock)
        guest.sock.setblocking(True)
        if hello.rank in self.joined:  # it was started again before the run began
            self.joined[hello.rank].sock.close()
        self._known[hello.rank] = hello.incarnation
        self.unreachable.pop(hello.rank, None)
        self.joined[hello.rank] = Contact(guest.sock, hello.incarnation, pid)

    def _hang_up_on(self, peer: int) -> None:
        """Drop a call to that peer that it has not answered yet."""
        for guest in self._guests():
            if guest.dialled == peer:
                self._remove(guest)

    def _turn_away(self, guest: _Guest, why: str = "") -> None:
        self._remove(guest)
        if guest.dialled is not None:
            how = why or f"hung up on node {self.card.rank} before the run began"
            self._give_up(guest.dialled, f"node {guest.dialled} at port {guest.port} {how}")

    def _give_up(self, peer: int, why: str, error: OSError | None = None) -> None:
        if self.card.incarnation == 0:
            raise PeerLost(why) from error
        self.unreachable[peer] = why
