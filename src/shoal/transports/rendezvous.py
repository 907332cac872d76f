"""Rendezvous: how nodes find each other through a torch.distributed Store."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable, Set
from typing import Protocol

from shoal.core.errors import PeerLost


class Store(Protocol):
    """The part of torch.distributed.Store that Shoal uses."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value; waits until somebody has set it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are set."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Publish a value if the present one is `expected`, "" for none. Returns the value from then on."""
        ...


def await_keys(
    store: Store, keys: dict[int, str], seconds: float, gone: Set[int] = frozenset()
) -> dict[int, str]:
    """Wait until the store holds the key of every rank. Returns the keys still missing after `seconds`.

    Ranks in `gone`, which may grow meanwhile, are not waited for. Polls, because the `wait` of a
    FileStore rounds its timeout up to whole seconds.
    """
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        left = set(gone)  # before we look at the store: a rank may publish its key and leave at once
        keys = {rank: key for rank, key in keys.items() if not store.check([key])}
        if keys.keys() <= left or time.monotonic() >= deadline:
            return keys
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def hub_key(rank: int) -> str:
    """The key under which a gRPC hub publishes its address."""
    return f"shoal/grpc/{rank}"


def missing(rank: int, ranks: Iterable[int], seconds: float, what: str) -> PeerLost:
    """The error that names the ranks that did not come."""
    names = ", ".join(str(r) for r in sorted(ranks))
    return PeerLost(
        f"node {names} did not {what} within {seconds:g} s (I am node {rank}). Look at its own output."
    )


def is_loopback(host: str) -> bool:
    """Whether `host` is this host. Every name but localhost counts as remote: it may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
