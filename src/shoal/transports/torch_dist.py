"""TorchTransport: messages and sums over the gloo backend of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.core.transport import HEADER_BYTES, LEFT, Message, Reduction
from shoal.transports import frames
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.gloo_sums import FOR_EVER, Gloo, GlooSums, break_group, finish
from shoal.transports.rendezvous import Store, await_keys, missing

_HEADER_TAG, _PART_TAG = 0, 1


class TorchTransport(Endpoint):
    """Gloo process groups of our own: torch.distributed's global state is neither used nor touched.

    Each pair of nodes is a group, with a receiving thread at both ends: gloo closes all connections of a
    group when one fails, and one that is frozen must not cut off the others. One more group joins the
    workers, ranks 0 to `workers` - 1, for sums.
    Gloo encrypts nothing and trusts whoever connects: between hosts, use it on a network of your own.
    """

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store: Store,
        *,
        workers: int,
        limit_bytes: int,
        timeout: float = 300.0,
        interface: str | None = None,
    ) -> TorchTransport:
        """Join the `size` nodes that meet at `store`; returns when all are connected.

        Without `interface` it takes GLOO_SOCKET_IFNAME, else loopback: left to itself gloo may choose a
        network that leads nowhere, and hang. The store is used to the end, to tell who fell out of a
        collective; give each run a fresh one, or a PrefixStore. Raises PeerLost naming who did not come.
        """
        if not 0 < workers <= size:
            raise ValueError(f"workers={workers} must be 1 to size={size}")
        store.set(f"shoal/here/{rank}", "")
        if absent := await_keys(store, {r: f"shoal/here/{r}" for r in range(size)}, timeout):
            raise missing(rank, absent, timeout, "come to the meeting point")
        joining = _Joining(store, _devices(interface), timeout)
        peers = [peer for peer in range(size) if peer != rank]
        peers.sort(key=lambda peer: (rank + peer) % size)  # both ends of a pair come to it in the same turn
        pairs = {peer: joining.pair(rank, peer) for peer in peers}
        ring = joining.ring(rank, workers) if rank < workers else None
        return cls(rank, size, store, pairs, ring, workers=workers, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        pairs: dict[int, Gloo],
        ring: Gloo | None,
        *,
        workers: int,
        limit_bytes: int,
        timeout: float,
    ) -> None:
        super().__init__(rank, size, limit_bytes)
        self.timeout = timeout
        self._pairs = pairs
        self._silent: set[int] = set()  # peers we have said goodbye to, or cannot reach
        self._sums = None if ring is None else GlooSums(ring, rank, workers, store, self._silent)
        self._locks = {peer: threading.Lock() for peer in range(size) if peer != rank}
        self._readers = {
            peer: threading.Thread(
                target=self._read, args=(peer,), name=f"shoal {rank} from {peer}", daemon=True
            )
            for peer in self._locks
        }
        for reader in self._readers.values():
            reader.start()
        # a thread that comes back from gloo when the interpreter is gone would abort the process
        atexit.register(self._hang_up, 0.0)

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the workers, in place; the bytes this node sent, as a ring algorithm would.

        Raises PeerLost naming who is missing after `timeout` seconds, or the transport's own timeout;
        the group is broken then, `v` undefined, and every later call fails at once. Raises ValueError if
        the workers bring different dtypes or lengths.
        """
        return self._workers_sums().sum(v, self.timeout if timeout is None else timeout)

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """The same, part by part: gloo's own thread sums what has started while the rest is computed.

        Fails as `all_reduce` does, here if the workers bring different parts, else when it is finished.
        What is never finished is given up when the transport closes.
        """
        return self._workers_sums().begin(v, parts, self.timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Say goodbye, wait for everyone's, release groups and threads. A frozen peer costs 5 s."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + CLOSING_SECONDS
        goodbyes = [work for peer in self._locks for work in self._say_goodbye(peer)]
        with contextlib.suppress(RuntimeError):  # dead or frozen: there is nobody to wait for
            finish(goodbyes, deadline)
        self._hang_up(deadline)
        atexit.unregister(self._hang_up)
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        self._pairs.clear()

    def _hang_up(self, deadline: float) -> None:
        """End all readers; until then they have time to take leave."""
        self._closing = True
        for peer, reader in self._readers.items():
            reader.join(max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                break_group(self._pairs[peer], self._seat(peer))
            reader.join()

    def _workers_sums(self) -> GlooSums:
        if self._sums is None:
            why = "has closed its transport" if self._closing else "is not a worker"
            raise ValueError(f"node {self.rank} {why} and cannot take part in all_reduce")
        return self._sums

    def _seat(self, peer: int) -> int:
        """The rank of a peer in the group of two."""
        return int(peer > self.rank)

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        with self._locks[dst]:
            if dst in self._silent:
                return
            try:
                finish(self._post(dst, header, parts), time.monotonic() + self.timeout)
            except RuntimeError as error:
                self._silent.add(dst)
                self.reasons.setdefault(dst, f"node {dst} does not take what it is sent: {error}")

    def _post(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> list[dist.Work]:
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        tagged = [(head, _HEADER_TAG), *((part, _PART_TAG) for part in parts)]
        return [self._pairs[dst].send([tensor], self._seat(dst), tag) for tensor, tag in tagged]

    def _say_goodbye(self, peer: int) -> list[dist.Work]:
        with self._locks[peer]:
            if peer in self._silent:
                return []
            self._silent.add(peer)
            try:
                return self._post(peer, self._goodbye(), ())
            except RuntimeError:  # gone before us
                return []

    def _read(self, peer: int) -> None:
        """Deliver all that comes from `peer`, then the notice that nothing more does."""
        try:
            while (message := self._read_message(peer)).tag != LEFT:
                self._arrived.put(message)
        except WireError as error:
            self._give_up(peer, error)
        except RuntimeError as error:
            with self._locks[peer]:  # whoever is sending fails too, and knows why better than we do
                self._give_up(peer, error)
        else:
            self._announce(peer, None)
            with contextlib.suppress(RuntimeError):  # it closes, and waits for our answer
                for work in self._say_goodbye(peer):
                    work.wait(FOR_EVER)

    def _give_up(self, peer: int, error: Exception) -> None:
        self._silent.add(peer)
        self._announce(peer, error)

    def _read_message(self, peer: int) -> Message:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._take(peer, header, _HEADER_TAG).wait(FOR_EVER)
        message, shapes = self._decode(peer, frames.bytes_of(header))
        message.parts = tuple(torch.empty(elements, dtype=dtype) for dtype, elements in shapes)
        for work in [self._take(peer, part, _PART_TAG) for part in message.parts]:
            work.wait(FOR_EVER)
        return message

    def _take(self, peer: int, into: Tensor, tag: int) -> dist.Work:
        return self._pairs[peer].recv([into], self._seat(peer), tag)


def _devices(interface: str | None) -> list[Any]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    names = interface or os.environ.get("GLOO_SOCKET_IFNAME") or loopback
    try:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    except RuntimeError as error:
        raise Unavailable(
            f"gloo cannot use network interface '{names}': {error}. Give interface=..."
        ) from error


class _Joining(NamedTuple):
    """What all groups of a node are made with."""

    store: Store
    devices: list[Any]
    timeout: float

    def pair(self, rank: int, peer: int) -> Gloo:
        """The group of two nodes. Without a thread: only sums need one."""
        first, second = sorted((rank, peer))
        return self._group(f"pair of nodes {first} and {second}", int(rank == second), 2, threads=0)

    def ring(self, rank: int, workers: int) -> Gloo:
        """The group of the workers."""
        return self._group(f"ring of {workers} workers", rank, workers, threads=1)

    def _group(self, name: str, rank: int, size: int, threads: int) -> Gloo:
        c10d: Any = dist  # torch's stubs know neither these options nor PrefixStore
        options = c10d.ProcessGroupGloo._Options()
        options._devices = self.devices
        options._threads = threads
        options._timeout = timedelta(seconds=self.timeout)
        try:
            prefixed = c10d.PrefixStore(f"shoal/{name}", self.store)
            return cast(Gloo, c10d.ProcessGroupGloo(prefixed, rank, size, options))
        except RuntimeError as error:
            raise PeerLost(f"gloo could not connect the {name}: {error}") from error
