"""TorchTransport: messages and all-reduce over the gloo backend of torch.distributed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence, Set
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.core.transport import DTYPES, HEADER_BYTES, LEFT, Message
from shoal.transports import frames
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.rendezvous import Store, await_keys, missing

REPORT_SECONDS = 2.0
"""How long the survivors of an all-reduce that ran out of time wait to hear who else survived."""

_FOR_EVER = timedelta(days=3650)  # gloo closes every connection of a group when one wait times out
_HEADER_TAG, _PART_TAG, _BREAK_TAG = 0, 1, 2

Signature = str
"""Length and dtype of what a worker brings to an all-reduce, as in "1000 x float32"."""


class _Gloo(Protocol):
    """What is asked of a ProcessGroupGloo."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work: ...

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, timeout: timedelta, /) -> dist.Work: ...


class TorchTransport(Endpoint):
    """Gloo process groups of our own: torch.distributed's global state is neither used nor touched.

    One group joins all nodes, with a receiving thread for each peer, so that the peer whose connection
    breaks is known. Another joins the workers, ranks 0 to `workers` - 1, for `all_reduce`.
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
        devices = _devices(interface)
        mesh = _group("mesh", store, rank, size, devices, timeout)
        ring = _group("ring", store, rank, workers, devices, timeout) if rank < workers else None
        return cls(rank, size, store, mesh, ring, workers=workers, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        mesh: _Gloo,
        ring: _Gloo | None,
        *,
        workers: int,
        limit_bytes: int,
        timeout: float,
    ) -> None:
        super().__init__(rank, size, limit_bytes)
        self.timeout = timeout
        self._mesh = mesh
        self._silent: set[int] = set()  # peers we have said goodbye to, or cannot reach
        self._reducer = None if ring is None else _Reducer(ring, rank, workers, store, self._silent)
        self._locks = {peer: threading.Lock() for peer in range(size) if peer != rank}
        self._readers = [
            threading.Thread(target=self._read, args=(peer,), name=f"shoal {rank} from {peer}", daemon=True)
            for peer in self._locks
        ]
        for reader in self._readers:
            reader.start()

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the workers, in place; the bytes this node sent, as a ring algorithm would.

        Raises PeerLost naming who is missing after `timeout` seconds, or the transport's own timeout;
        the group is broken then, `v` undefined, and every later call fails at once. Raises ValueError if
        the workers bring different dtypes or lengths.
        """
        if self._reducer is None:
            why = "has closed its transport" if self._closing else "is not a worker"
            raise ValueError(f"node {self.rank} {why} and cannot take part in all_reduce")
        return self._reducer.sum(v, self.timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Say goodbye, wait for everyone's, release groups and threads. A frozen peer costs 5 s."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + CLOSING_SECONDS
        goodbyes = [work for peer in self._locks for work in self._say_goodbye(peer)]
        with contextlib.suppress(RuntimeError):  # dead or frozen: there is nobody to wait for
            _finish(goodbyes, timedelta(seconds=CLOSING_SECONDS))
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if any(reader.is_alive() for reader in self._readers):
            _break(self._mesh, min(self._locks))
        for reader in self._readers:
            reader.join()
        self._reducer = None
        del self._mesh

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        with self._locks[dst]:
            if dst in self._silent:
                return
            try:
                _finish(self._post(dst, header, parts), timedelta(seconds=self.timeout))
            except RuntimeError as error:
                self._silent.add(dst)
                self.reasons.setdefault(dst, f"node {dst} does not take what it is sent: {error}")

    def _post(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> list[dist.Work]:
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        tagged = [(head, _HEADER_TAG), *((part, _PART_TAG) for part in parts)]
        return [self._mesh.send([tensor], dst, tag) for tensor, tag in tagged]

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
        except (RuntimeError, WireError) as error:
            self._silent.add(peer)
            self._announce(peer, error)
        else:
            self._announce(peer, None)
            with contextlib.suppress(RuntimeError):  # it closes, and waits for our answer
                _finish(self._say_goodbye(peer), _FOR_EVER)

    def _read_message(self, peer: int) -> Message:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._mesh.recv([header], peer, _HEADER_TAG).wait(_FOR_EVER)
        message, shapes = self._decode(peer, frames.bytes_of(header))
        parts = [torch.empty(elements, dtype=dtype) for dtype, elements in shapes]
        _finish([self._mesh.recv([part], peer, _PART_TAG) for part in parts], _FOR_EVER)
        message.parts = tuple(parts)
        return message


class _Reducer:
    """Gloo's all-reduce among the workers, but one that says who is missing and survives a wrong length."""

    def __init__(self, ring: _Gloo, rank: int, workers: int, store: Store, gone: Set[int]) -> None:
        self._ring, self._rank, self._workers, self._store, self._gone = ring, rank, workers, store, gone
        self._number = 0
        self._last: Signature | None = None
        self._successor: dict[Signature, Signature] = {}
        self._broken: str | None = None

    def sum(self, v: Tensor, seconds: float) -> int:
        if v.dtype not in DTYPES:
            raise ValueError(f"all_reduce cannot sum {v.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if self._broken:
            raise PeerLost(self._broken)
        if self._workers == 1:
            return 0
        self._number += 1
        deadline = time.monotonic() + seconds
        signature = f"{v.numel()} x {str(v.dtype).removeprefix('torch.')}"
        self._agree_on(signature, deadline)
        host = v.detach().to("cpu").contiguous()  # shares the memory of v where it can
        try:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            self._ring.allreduce(host, dist.ReduceOp.SUM, left).wait()
        except RuntimeError as error:
            raise self._diagnosis(signature, deadline) from error
        if host.data_ptr() != v.data_ptr():
            v.detach().copy_(host)
        return 2 * (self._workers - 1) * host.nbytes // self._workers

    def _agree_on(self, signature: Signature, deadline: float) -> None:
        """Compare what the workers bring, unless it is what was to be expected; gloo aborts on a mismatch.

        Expected is what followed last time. All workers agreed on everything so far, so they all expect
        the same; one that brings something else asks the others, who do not answer, and nobody gets
        into gloo with a wrong length.
        """
        if self._expected() != signature:
            self._store.set(self._key("brings", self._rank), signature)
            absent = await_keys(self._store, self._keys("brings"), deadline - time.monotonic(), self._gone)
            if absent:
                raise self._diagnosis(signature, deadline)
            self._refuse_mismatch(self._reports("brings", range(self._workers)))
        if self._last is not None:
            self._successor[self._last] = signature
        self._last = signature

    def _expected(self) -> Signature | None:
        return None if self._last is None else self._successor.get(self._last, self._last)

    def _diagnosis(self, signature: Signature, deadline: float) -> PeerLost:
        """Every survivor reports to the store; who does not is missing. Raises ValueError for a mismatch."""
        # Or neighbours in the ring, who have lost nobody, would wait for us until their own timeout.
        _break(self._ring, (self._rank + 1) % self._workers)
        failed = f"all_reduce {self._number} of {signature} failed (I am worker {self._rank})"
        self._broken = failed
        patience = max(REPORT_SECONDS, deadline - time.monotonic())
        try:
            self._store.set(self._key("failed", self._rank), signature)
            absent = await_keys(self._store, self._keys("failed"), patience, self._gone)
            reports = self._reports("failed", self._keys("failed").keys() - absent.keys())
        except RuntimeError as gone:
            return PeerLost(f"{failed}, and the store that could tell who is missing does not answer: {gone}")
        self._refuse_mismatch(reports)
        fates = [f"worker {r} " + ("is gone" if r in self._gone else "did not come in time") for r in absent]
        self._broken = f"{failed}: {', '.join(fates) or 'everyone is alive, but somebody came late'}"
        return PeerLost(self._broken)

    def _refuse_mismatch(self, brought: dict[int, Signature]) -> None:
        if len(set(brought.values())) > 1:
            listed = ", ".join(f"worker {rank} brings {what}" for rank, what in sorted(brought.items()))
            raise ValueError(f"all_reduce {self._number} needs the same dtype and length from all: {listed}")

    def _key(self, what: str, rank: int) -> str:
        return f"shoal/{what}/{self._number}/{rank}"

    def _keys(self, what: str) -> dict[int, str]:
        return {rank: self._key(what, rank) for rank in range(self._workers)}

    def _reports(self, what: str, ranks: Iterable[int]) -> dict[int, Signature]:
        return {rank: self._store.get(self._key(what, rank)).decode() for rank in ranks}


def _finish(works: Sequence[dist.Work], patience: timedelta) -> None:
    for work in works:
        work.wait(patience)


def _break(group: _Gloo, peer: int) -> None:
    """Wake every thread, here and at the peers, that waits in the group.

    Gloo's own abort leaves a pending receive waiting; a wait that times out closes all connections.
    """
    scrap = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        group.recv([scrap], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))


def _devices(interface: str | None) -> list[Any]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    names = interface or os.environ.get("GLOO_SOCKET_IFNAME") or loopback
    try:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    except RuntimeError as error:
        raise Unavailable(
            f"gloo cannot use network interface '{names}': {error}. Give interface=..."
        ) from error


def _group(name: str, store: Store, rank: int, size: int, devices: list[Any], timeout: float) -> _Gloo:
    c10d: Any = dist  # torch's stubs know neither these options nor PrefixStore
    options = c10d.ProcessGroupGloo._Options()
    options._devices = devices
    options._threads = 1
    options._timeout = timedelta(seconds=timeout)
    try:
        prefixed = c10d.PrefixStore(f"shoal/{name}", store)
        return cast(_Gloo, c10d.ProcessGroupGloo(prefixed, rank, size, options))
    except RuntimeError as error:
        raise PeerLost(
            f"gloo could not connect the {name} of {size} nodes (I am node {rank}): {error}"
        ) from error
