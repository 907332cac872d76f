"""How the processes of one host find and recognise each other."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from shoal.core.errors import PeerLost

HELLO_SECONDS = 5.0
"""How long a stranger may take to prove that it belongs to the run."""

_MAGIC = b"shoal/1\n"
_HELLO = struct.Struct("<8sI32s")  # magic, rank, token
_TOKEN_KEY = "shoal/token"


class Store(Protocol):
    """What is asked of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value, waiting for it if need be."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there by now."""
        ...


def await_keys(
    store: Store, keys: dict[int, str], seconds: float, gone: Set[int] = frozenset()
) -> dict[int, str]:
    """Wait until the store holds the key of every rank; what did not come in time, or is not going to.

    Ranks in `gone`, which may grow meanwhile, are not waited for. Asks again and again, since a
    FileStore rounds the timeout of its own `wait` up to whole seconds.
    """
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        keys = {rank: key for rank, key in keys.items() if not store.check([key])}
        if keys.keys() <= gone or time.monotonic() >= deadline:
            return keys
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def missing(rank: int, ranks: Iterable[int], seconds: float, what: str) -> PeerLost:
    """The error that names who did not come."""
    names = ", ".join(str(r) for r in sorted(ranks))
    return PeerLost(
        f"node {names} did not {what} within {seconds:g} s (I am node {rank}). Look at its own output."
    )


def meet(rank: int, size: int, store: Store, *, timeout: float, host: str) -> dict[int, socket.socket]:
    """One connection to each other rank, both ends having shown that they know the run's token.

    Higher ranks dial lower ones. The store carries addresses and the token, so it must be readable by
    the run's own user alone. Raises PeerLost naming the ranks that did not come.
    """
    with _listen(host, size) as listener:
        port = listener.getsockname()[1]
        if rank == 0:
            store.set(_TOKEN_KEY, secrets.token_hex(32))  # before the address: who finds that finds this
        store.set(_address_key(rank), f"{host} {port}")
        deadline = time.monotonic() + timeout
        if await_keys(store, {r: _address_key(r) for r in range(rank)}, timeout):
            absent = await_keys(store, {r: _address_key(r) for r in range(size)}, 0.0)
            raise missing(rank, absent, timeout, "come to the meeting point")
        token = bytes.fromhex(store.get(_TOKEN_KEY).decode())
        lobby = _Lobby(rank, size, token, listener)
        try:
            for peer in range(rank):
                lobby.dial(peer, store.get(_address_key(peer)).decode())
            lobby.await_all(deadline)
            if lobby.absent():
                raise missing(rank, lobby.absent(), timeout, "join the mesh")
            return lobby.dismiss()
        finally:
            lobby.close()


def _address_key(rank: int) -> str:
    return f"shoal/addr/{rank}"


def _require_loopback(host: str) -> None:
    address = ipaddress.ip_address(host)
    if address.version != 4 or not address.is_loopback:
        raise ValueError(
            f"host {host} is not an IPv4 loopback address; frames travel in the clear, so sockets stay on "
            "127.0.0.1. Between hosts use the torch_dist transport."
        )


def _listen(host: str, size: int) -> socket.socket:
    _require_loopback(host)
    return socket.create_server((host, 0), backlog=size + 16)


@dataclass(eq=False)
class _Guest:
    """A connection whose other end has not shown the token yet."""

    sock: socket.socket
    deadline: float
    dialled: int | None = None  # the rank we called; None if it called us
    heard: bytearray = field(default_factory=bytearray)


class _Lobby:
    """Where connections wait until they are recognised. Nobody in it can hold up anybody else."""

    def __init__(self, rank: int, size: int, token: bytes, listener: socket.socket) -> None:
        self.rank, self.size, self.token, self.listener = rank, size, token, listener
        self.joined: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def dial(self, peer: int, address: str) -> None:
        """Call a lower rank and say who we are; its answer comes when it gets to it."""
        host, port = address.split()
        _require_loopback(host)
        try:
            sock = socket.create_connection((host, int(port)), timeout=HELLO_SECONDS)
            self._seat(_Guest(sock, deadline=float("inf"), dialled=peer))
            sock.sendall(_HELLO.pack(_MAGIC, self.rank, self.token))
        except OSError as error:
            raise PeerLost(f"node {peer} published {address} but does not answer there: {error}") from error

    def await_all(self, deadline: float) -> None:
        """Let guests in until all ranks have joined or the time is over."""
        while self.absent() and (now := time.monotonic()) < deadline:
            next_event = min([deadline, *(guest.deadline for guest in self._guests())])
            for key, _ in self.selector.select(next_event - now):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            for guest in self._guests():
                if guest.deadline <= time.monotonic():
                    self._turn_away(guest)

    def absent(self) -> set[int]:
        return set(range(self.size)) - {self.rank} - set(self.joined)

    def dismiss(self) -> dict[int, socket.socket]:
        """Hand the finished connections over to the caller."""
        joined, self.joined = self.joined, {}
        return joined

    def close(self) -> None:
        """Close whatever was not handed over."""
        for sock in (*(guest.sock for guest in self._guests()), *self.joined.values()):
            sock.close()
        self.selector.close()

    def _guests(self) -> list[_Guest]:
        return [key.data for key in self.selector.get_map().values() if key.data is not None]

    def _seat(self, guest: _Guest) -> None:
        guest.sock.setblocking(False)
        self.selector.register(guest.sock, selectors.EVENT_READ, guest)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:  # it hung up before its turn
            return
        self._seat(_Guest(sock, time.monotonic() + HELLO_SECONDS))

    def _hear(self, guest: _Guest) -> None:
        try:
            said = guest.sock.recv(_HELLO.size - len(guest.heard))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.heard += said
        if not said:
            self._turn_away(guest)
        elif len(guest.heard) == _HELLO.size:
            self._recognise(guest)

    def _recognise(self, guest: _Guest) -> None:
        magic, peer, token = _HELLO.unpack(guest.heard)
        expected = self.absent() & (
            set(range(self.rank + 1, self.size)) if guest.dialled is None else {guest.dialled}
        )
        if not (magic == _MAGIC and hmac.compare_digest(token, self.token) and peer in expected):
            self._turn_away(guest)
            return
        self.selector.unregister(guest.sock)
        guest.sock.setblocking(True)
        self.joined[peer] = guest.sock
        if guest.dialled is None:
            with contextlib.suppress(OSError):  # died just now: the transport will say so
                guest.sock.sendall(_HELLO.pack(_MAGIC, self.rank, self.token))

    def _turn_away(self, guest: _Guest) -> None:
        self.selector.unregister(guest.sock)
        guest.sock.close()
        if guest.dialled is not None:
            raise PeerLost(f"node {guest.dialled} hung up on node {self.rank} before the run began")
