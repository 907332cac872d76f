"""How the processes of one host find and recognise each other."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Set
from typing import Protocol

from shoal.core.errors import PeerLost
from shoal.transports.cards import Card
from shoal.transports.lobby import Lobby, listen
from shoal.transports.memory import Probe

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


def meet(
    rank: int,
    size: int,
    store: Store,
    *,
    timeout: float,
    host: str,
    incarnation: int = 0,
    share: bool = False,
) -> Lobby:
    """A lobby with one connection to each other rank, both ends having proved that they know the run's token.

    In the beginning higher ranks call lower ones, and all must come: raises PeerLost naming who did not.
    A node that was started again, as incarnation 1 or later, calls everybody, and goes on without those
    that do not answer. The store carries addresses and the token, so it must be readable by the run's own
    user alone. The lobby stays open for those who come back later; the caller closes it.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as held:
        listener = held.enter_context(listen(host, size))
        probe = Probe(share)
        held.callback(probe.retire)
        _publish(store, rank, incarnation, f"{host} {listener.getsockname()[1]}")
        callees = [r for r in range(size) if r < rank or (incarnation and r != rank)]
        if await_keys(store, {r: _address_key(r) for r in callees}, timeout):
            absent = await_keys(store, {r: _address_key(r) for r in range(size)}, 0.0)
            raise missing(rank, absent, timeout, "come to the meeting point")
        token = bytes.fromhex(store.get(_TOKEN_KEY).decode())
        lobby = Lobby(Card(rank, size, token, incarnation, probe), listener)
        held.pop_all()
        held.callback(lobby.close)
        for peer in callees:
            lobby.dial(peer, *_newest_address(store, peer))
        lobby.await_all(deadline)
        if incarnation:
            lobby.go_on_without(lobby.absent(), f"did not answer within {timeout:g} s")
        elif lobby.absent():
            raise missing(rank, lobby.absent(), timeout, "join the mesh")
        held.pop_all()
        return lobby


def _publish(store: Store, rank: int, incarnation: int, address: str) -> None:
    if rank == 0 and not (incarnation and store.check([_TOKEN_KEY])):
        store.set(_TOKEN_KEY, secrets.token_hex(32))  # before the address: who finds that finds this
    store.set(_address_key(rank, incarnation), address)
    for earlier in reversed(range(incarnation)):  # no gaps, so that the latest can be found by counting
        if not store.check([_address_key(rank, earlier)]):
            store.set(_address_key(rank, earlier), "")


def _newest_address(store: Store, rank: int) -> tuple[str, int]:
    """Where the latest incarnation of that rank listens, and which it is."""
    incarnation = 0
    while store.check([_address_key(rank, incarnation + 1)]):
        incarnation += 1
    return store.get(_address_key(rank, incarnation)).decode(), incarnation


def _address_key(rank: int, incarnation: int = 0) -> str:
    return f"shoal/addr/{rank}/{incarnation}" if incarnation else f"shoal/addr/{rank}"
