"""GrpcTransport: between hosts. Hubs listen; the other nodes call them and need no open port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import grpc
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.transports import memory
from shoal.transports.arrivals import Arrivals
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.grpc.door import Door
from shoal.transports.grpc.hub import Hub
from shoal.transports.grpc.security import Security, join_address, split_address
from shoal.transports.grpc.spoke import Spoke
from shoal.transports.grpc.terms import Terms
from shoal.transports.grpc.wire import keep_freed_slices
from shoal.transports.memory import Probe
from shoal.transports.rendezvous import Store, missing


class GrpcTransport(Endpoint):
    """Messages over gRPC: protobuf for control, raw slices into preallocated memory for tensors.

    `hubs` listen; every other node calls each of them, a hub those below it. What two nodes that are no
    hubs say to each other passes through the first hub. A node that is silent for twice the
    `failure_timeout` is lost. A hub takes in one large message at a time: until there is room, `send`
    waits. Large messages between a hub and a process of its own host lie in shared memory, and arrive as
    views on it.
    """

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        *,
        hubs: tuple[int, ...],
        run_id: str,
        manifest: str,
        limit_bytes: int,
        security: Security,
        addresses: Mapping[int, str] | None = None,
        store: Store | None = None,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        timeout: float = 60.0,
        failure_timeout: float = 5.0,
        incarnation: int = 0,
        share_memory: bool | None = None,
    ) -> GrpcTransport:
        """Join the `size` nodes of the run; returns when all are connected.

        Hubs are found at `addresses`, or at what they publish in `store`: their `listen` address, under the
        host name `advertise` if given. Raises PeerLost naming who did not come within `timeout` seconds, or
        why a hub refused this node. A hub that was started again, as `incarnation` 1 or later, goes on
        without those who do not come, and they are announced as lost. `share_memory` defaults to what
        SHOAL_SHARED_MEMORY says, else to whether the system can; who is on another host is served all the
        same.
        """
        if (addresses is None) == (store is None):
            raise ValueError("give addresses, or a store in which the hubs publish theirs")
        terms = Terms(
            rank, size, tuple(hubs), run_id, manifest, limit_bytes, timeout, failure_timeout, incarnation
        )
        share = memory.choose(share_memory)
        transport = cls(terms, security, listen, _Directory(addresses, store, advertise), share)
        try:
            transport._meet(time.monotonic() + timeout)
        except BaseException:
            transport._abandon()
            raise
        return transport

    def __init__(
        self, terms: Terms, security: Security, listen: str, directory: _Directory, share: bool
    ) -> None:
        super().__init__(terms.rank, terms.size, terms.limit_bytes)
        keep_freed_slices()
        self._terms = terms
        self._arrivals = Arrivals(self._arrived.put, self.reasons)
        self._stirred = threading.Event()
        self._spokes: dict[int, Spoke] = {}
        self._hub: Hub | None = None
        self._door: Door | None = None
        self._probe = Probe(share)
        try:
            if terms.rank in terms.hubs:
                self._hub = Hub(terms, self._probe, self._arrivals, self._decode, self._stirred)
                self._door = Door(self._hub, terms, security, listen)
                directory.publish(terms.rank, self._door.address)
            for hub in terms.dials:
                self._spokes[hub] = Spoke(
                    hub, terms, self._probe, security, directory.find, self._arrivals, self._stirred
                )
        except BaseException:
            self._abandon()
            raise

    @property
    def address(self) -> str | None:
        """Where a hub listens; None for other nodes."""
        return None if self._door is None else self._door.address

    async def close(self) -> None:
        """Say goodbye, wait until that was heard, release threads and ports. A frozen peer costs 5 s.

        The first hub stays, at most for `timeout` seconds, while two others may have something to say to
        each other.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if self._hub is not None:
                self._hub.shut()
            for _ in self.drain():  # nobody else is going to, and who sends may wait for room
                pass
            self._say_goodbye()
            if self._hub is not None:
                self._hub.close()
        finally:
            self._abandon()

    def _meet(self, deadline: float) -> None:
        while (absent := self._absent()) and (seconds := deadline - time.monotonic()) > 0:
            for spoke in self._spokes.values():
                if spoke.failure is not None:
                    raise PeerLost(spoke.failure)
            self._stirred.wait(seconds)
            self._stirred.clear()
        if absent and (self._terms.incarnation == 0 or any(not s.is_ready for s in self._spokes.values())):
            came = set() if self._hub is None else self._hub.came()  # and may have given up just before us
            raise missing(self.rank, absent - came or absent, self._terms.timeout, "join")
        if self._hub is not None:
            self._hub.admit()

    def _absent(self) -> set[int]:
        absent = set() if self._hub is None else self._hub.absent()
        return absent.union(*(spoke.absent for spoke in self._spokes.values() if not spoke.is_ready))

    def _abandon(self) -> None:
        """Release everything, without a word."""
        for spoke in self._spokes.values():
            spoke.end()
        if self._hub is not None:
            self._hub.abandon()
        if self._door is not None:
            self._door.close()
        self._probe.retire()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + CLOSING_SECONDS
        for heard in [spoke.leave(self._goodbye(), CLOSING_SECONDS) for spoke in self._spokes.values()]:
            if heard is not None:
                with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                    heard.exception(timeout=max(0.0, deadline - time.monotonic()))

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        if dst in self._terms.expects and self._hub is not None:
            self._hub.transmit(dst, header, parts)
        elif dst in self._spokes:
            self._spokes[dst].transmit(dst, header, parts)
        else:
            self._arrivals.acquaint(dst)
            self._spokes[self._terms.relay].transmit(dst, header, parts)

    def _taken(self, m: Message) -> Message:
        self._arrivals.taken(m)
        if self._hub is not None:
            self._hub.taken(m)
        return m


class _Directory:
    """Where the hubs are."""

    def __init__(
        self, addresses: Mapping[int, str] | None, store: Store | None, advertise: str | None
    ) -> None:
        self._addresses = {**(addresses or {})}
        self._store = store
        self._advertise = advertise

    def publish(self, rank: int, address: str) -> None:
        if self._store is None:
            return
        host, port = split_address(address)
        if self._advertise is not None or host in ("0.0.0.0", "::"):
            address = join_address(self._advertise or socket.gethostname(), port)
        self._store.set(_key(rank), address)

    def find(self, rank: int) -> str | None:
        """The address of a hub; None if it is not known yet. Asks anew: a hub may come back elsewhere."""
        if self._store is not None:
            try:
                if self._store.check([_key(rank)]):
                    self._addresses[rank] = self._store.get(_key(rank)).decode()
            except RuntimeError:  # the store is gone; the hub may still be where it was
                pass
        return self._addresses.get(rank)


def _key(rank: int) -> str:
    return f"shoal/grpc/{rank}"
