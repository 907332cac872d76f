"""GlooTransport: messages and all-reduce over the gloo backend of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
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
from shoal.transports.gloo.all_reduce import (
    NO_TIMEOUT,
    GlooAllReduce,
    GlooGroup,
    StoreSchedule,
    break_group,
    finish,
)
from shoal.transports.gloo.signs_of_life import SIGNS, SignsOfLife
from shoal.transports.rendezvous import Store, await_keys, missing

_HEADER_TAG, _PART_TAG = 0, 1

PIECE_BYTES = 4 << 20
"""A larger part of a message travels in pieces of this size: each that arrives is a sign of life."""

ALIVE = "alive"
"""The tag of a message that nobody receives: its sender is there."""


class GlooTransport(Endpoint):
    """Messages over gloo process groups. Neither uses nor changes torch.distributed's global state.

    Each pair of nodes is a group, with a receiving thread at both ends: gloo closes all connections of a
    group when one fails, and a frozen node must not cut off the others. Another group joins the workers,
    ranks 0 to `workers` - 1, for all-reduce.
    Gloo encrypts nothing and trusts every connection: between hosts, use a private network. A host that
    vanishes breaks no connection: with `patience`, nodes send each other signs of life.
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
        patience: float | None = None,
        interface: str | None = None,
        address: str | None = None,
    ) -> GlooTransport:
        """Connect to the `size` nodes that meet at `store`; returns when all are connected.

        The node listens on `interface`, which defaults to GLOO_SOCKET_IFNAME, else at `address`, else on
        loopback: gloo's own choice may be an unreachable network, and hang. The store is used until the
        end, to find out who is missing when an all-reduce fails; pass a fresh one, or a PrefixStore, for
        each run. A peer that is silent for `patience` seconds is lost. Raises PeerLost naming the missing
        ranks.
        """
        if not 0 < workers <= size:
            raise ValueError(f"workers={workers} must be 1 to size={size}")
        store.set(f"shoal/here/{rank}", "")
        if absent := await_keys(store, {r: f"shoal/here/{r}" for r in range(size)}, timeout):
            raise missing(rank, absent, timeout, "come to the meeting point")
        groups = _GroupFactory(store, devices(interface, address), timeout)
        peers = [peer for peer in range(size) if peer != rank]
        peers.sort(key=lambda peer: (rank + peer) % size)  # both ends of a pair reach it in the same turn
        pairs = {peer: groups.pair(rank, peer) for peer in peers}
        ring = groups.ring(rank, workers) if rank < workers else None
        limits = {"limit_bytes": limit_bytes, "timeout": timeout, "patience": patience}
        return cls(rank, size, store, pairs, ring, workers=workers, **limits)  # type: ignore[arg-type]

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        pairs: dict[int, GlooGroup],
        ring: GlooGroup | None,
        *,
        workers: int,
        limit_bytes: int,
        timeout: float,
        patience: float | None,
    ) -> None:
        super().__init__(rank, size, limit_bytes)
        self.timeout = timeout
        self.notices_silence = patience is not None
        self._pairs = pairs
        self._unreachable: set[int] = set()  # peers that left, were lost, or heard our goodbye
        self._all_reduce = (
            None
            if ring is None
            else GlooAllReduce(
                ring, StoreSchedule(rank, range(workers), self._unreachable, store), self.reasons.keys()
            )
        )
        self._locks = {peer: threading.Lock() for peer in range(size) if peer != rank}
        self._readers = {
            peer: threading.Thread(
                target=self._read, args=(peer,), name=f"shoal {rank} from {peer}", daemon=True
            )
            for peer in self._locks
        }
        # more than a peer may have under way before it is lost: nobody waits for them
        self._signs: dict[int, deque[dist.Work]] = {peer: deque(maxlen=4 * SIGNS) for peer in self._locks}
        self._life = (
            None
            if patience is None
            else SignsOfLife(f"shoal {rank}", self._locks, patience, self._send_sign, self._lose)
        )
        for reader in self._readers.values():
            reader.start()
        # a thread that returns from gloo after the interpreter has ended would abort the process
        atexit.register(self._stop_readers, 0.0)

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the workers, in place; returns the bytes that a ring all-reduce sends.

        Raises PeerLost naming who is missing after `timeout` seconds, by default the transport's timeout.
        Then `v` is undefined and every later call fails at once. Raises ValueError if the workers'
        dtypes or lengths differ.
        """
        return self._worker_all_reduce().sum(v, self.timeout if timeout is None else timeout)

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """All-reduce part by part: gloo's thread sums started parts while the rest is computed.

        Fails as `all_reduce` does: at once if the workers' parts differ, else in `finish`. A reduction that
        is never finished is abandoned when the transport closes.
        """
        return self._worker_all_reduce().begin(v, parts, self.timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Say goodbye, wait for every peer's, release groups and threads. A frozen peer costs 5 s."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + CLOSING_SECONDS
        goodbyes = [work for peer in self._locks for work in self._say_goodbye(peer)]
        with contextlib.suppress(RuntimeError):  # the peer is dead or frozen
            finish(goodbyes, deadline)
        self._stop_readers(deadline)
        atexit.unregister(self._stop_readers)
        if self._all_reduce is not None:
            self._all_reduce.close()
            self._all_reduce = None
        self._pairs.clear()

    def _stop_readers(self, deadline: float) -> None:
        """Wait for the readers until `deadline`, then stop them."""
        self._closing = True
        if self._life is not None:
            self._life.end()
        for peer, reader in self._readers.items():
            reader.join(max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                break_group(self._pairs[peer], self._rank_in_pair(peer))
            reader.join()

    def _worker_all_reduce(self) -> GlooAllReduce:
        if self._all_reduce is None:
            why = "has closed its transport" if self._closing else "is not a worker"
            raise ValueError(f"node {self.rank} {why} and cannot take part in all_reduce")
        return self._all_reduce

    def _rank_in_pair(self, peer: int) -> int:
        """The rank of `peer` in its group of two."""
        return int(peer > self.rank)

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        with self._locks[dst]:
            if dst in self._unreachable:
                return
            try:
                for work in self._post(dst, header, parts):
                    finish([work], time.monotonic() + self.timeout)
            except RuntimeError as error:
                self._unreachable.add(dst)
                self.reasons.setdefault(dst, f"node {dst} does not take what it is sent: {error}")

    def _post(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> list[dist.Work]:
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        tagged = [(head, _HEADER_TAG), *((piece, _PART_TAG) for piece in _pieces(parts))]
        return [self._pairs[dst].send([tensor], self._rank_in_pair(dst), tag) for tensor, tag in tagged]

    def _send_sign(self, peer: int) -> None:
        """Tell a peer that this node is there, unless something is under way to it already."""
        if peer in self._unreachable or not self._locks[peer].acquire(blocking=False):
            return
        try:
            self._signs[peer] += self._post(peer, frames.encode(Message(ALIVE), (), self.rank), ())
        except RuntimeError:  # the connection has broken, which its reader tells
            pass
        finally:
            self._locks[peer].release()

    def _lose(self, peer: int, reason: str) -> None:
        """Give up a peer that is silent: its reader announces it."""
        self._unreachable.add(peer)
        self.reasons.setdefault(peer, reason)
        break_group(self._pairs[peer], self._rank_in_pair(peer))

    def _say_goodbye(self, peer: int) -> list[dist.Work]:
        with self._locks[peer]:
            if peer in self._unreachable:
                return []
            self._unreachable.add(peer)
            try:
                return self._post(peer, self._goodbye(), ())
            except RuntimeError:  # the peer closed before us
                return []

    def _read(self, peer: int) -> None:
        """Deliver all messages from `peer`, then LEFT or LOST."""
        try:
            while (message := self._read_message(peer)).tag != LEFT:
                if message.tag != ALIVE:
                    self._arrived.put(message)
        except WireError as error:
            self._give_up(peer, error)
        except RuntimeError as error:
            with self._locks[peer]:  # a send that fails too knows the reason better
                self._give_up(peer, error)
        else:
            self._announce(peer, None)
            with contextlib.suppress(RuntimeError):  # it is closing, and waits for our answer
                for work in self._say_goodbye(peer):
                    work.wait(NO_TIMEOUT)
        finally:
            if self._life is not None:
                self._life.forget(peer)

    def _give_up(self, peer: int, error: Exception) -> None:
        self._unreachable.add(peer)
        self._announce(peer, error)

    def _read_message(self, peer: int) -> Message:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._take(peer, header, _HEADER_TAG).wait(NO_TIMEOUT)
        message, shapes = self._decode(peer, frames.bytes_of(header))
        message.parts = tuple(torch.empty(elements, dtype=dtype) for dtype, elements in shapes)
        self._note(peer, message.nbytes)
        for work in [self._take(peer, piece, _PART_TAG) for piece in _pieces(message.parts)]:
            work.wait(NO_TIMEOUT)
            self._note(peer, message.nbytes)
        return message

    def _note(self, peer: int, under_way: int) -> None:
        """Something has come from a peer, and the next piece may follow."""
        if self._life is not None:
            self._life.heard(peer, min(under_way, PIECE_BYTES))

    def _take(self, peer: int, into: Tensor, tag: int) -> dist.Work:
        return self._pairs[peer].recv([into], self._rank_in_pair(peer), tag)


def _pieces(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts, of which large ones are cut; in the same way at both ends."""
    pieces = []
    for part in parts:
        flat, step = part.view(-1), PIECE_BYTES // part.itemsize
        pieces += [flat[begin : begin + step] for begin in range(0, max(1, flat.numel()), step)]
    return pieces


def devices(interface: str | None = None, address: str | None = None) -> list[Any]:
    """Where gloo listens: on `interface`, GLOO_SOCKET_IFNAME, at `address`, or else on loopback."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    names = interface or os.environ.get("GLOO_SOCKET_IFNAME") or loopback
    try:
        if names is loopback and address is not None:
            return [dist.ProcessGroupGloo.create_device(hostname=address)]
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    except RuntimeError as error:
        raise Unavailable(
            f"gloo cannot use network interface '{names}': {error}. Give interface=..."
        ) from error


class _GroupFactory(NamedTuple):
    """Makes the process groups of one node."""

    store: Store
    devices: list[Any]
    timeout: float

    def pair(self, rank: int, peer: int) -> GlooGroup:
        """The group of two nodes. It has no thread: only all-reduce needs one."""
        first, second = sorted((rank, peer))
        return self._group(f"pair of nodes {first} and {second}", int(rank == second), 2, threads=0)

    def ring(self, rank: int, workers: int) -> GlooGroup:
        """The group of the workers."""
        return self._group(f"ring of {workers} workers", rank, workers, threads=1)

    def _group(self, name: str, rank: int, size: int, threads: int) -> GlooGroup:
        try:
            return new_group(self.store, f"shoal/{name}", rank, size, self.devices, self.timeout, threads)
        except RuntimeError as error:
            raise PeerLost(f"gloo could not connect the {name}: {error}") from error


def new_group(
    store: Store, prefix: str, rank: int, size: int, devices: list[Any], timeout: float, threads: int
) -> GlooGroup:
    """Connect a process group, whose keys in the store begin with `prefix`; all its members call this."""
    c10d: Any = dist  # torch's stubs know neither these options nor PrefixStore
    options = c10d.ProcessGroupGloo._Options()
    options._devices = devices
    options._threads = threads
    options._timeout = timedelta(seconds=timeout)
    return cast(GlooGroup, c10d.ProcessGroupGloo(c10d.PrefixStore(prefix, store), rank, size, options))
