"""GrpcTransport: messages between hosts. Hubs listen; the other nodes call them and need no open port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import grpc
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.grpc.hub import Hub
from shoal.transports.grpc.hub_client import HubClient
from shoal.transports.grpc.hub_protocol import GrpcConfig, keep_freed_slices
from shoal.transports.grpc.security import Security, join_address, split_address
from shoal.transports.grpc.server import HubServer, Places
from shoal.transports.grpc.sessions import PeerTracker
from shoal.transports.rendezvous import Store, hub_key, missing
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.memory import MemoryProbe

BACK_SECONDS = 3.0
"""How long a node that is back waits for those that call it, where all nodes call each other."""


class GrpcTransport(Endpoint):
    """Messages over gRPC: protobuf for control, raw slices into preallocated memory for tensors.

    `hubs` listen; every other node calls each of them, and a hub those before it. The first hub forwards
    messages between nodes that are not hubs. A node that is silent for `failure_timeout` and then `patience`
    seconds (GrpcConfig.silence_seconds) is lost; one that dies is lost at once, since its connection breaks.
    A hub receives one large message at a time: until there is room, `send` waits. Large messages between a
    hub and a process of the same host travel in shared memory, and arrive as views on it.
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
        patience: float | None = None,
        incarnation: int = 0,
        share_memory: bool | None = None,
        late: Iterable[int] = (),
        places: Places | None = None,
    ) -> GrpcTransport:
        """Connect to the `size` nodes of the run; returns when all are connected.

        Hubs are found at `addresses`, or at the address they publish in `store`: their `listen` address,
        under the host name `advertise` if given. Raises PeerLost naming the nodes that did not come within
        `timeout` seconds, or why a hub refused this node. A restarted hub, `incarnation` 1 or later, goes
        on without missing nodes and announces them as lost. `share_memory` defaults to the environment
        variable SHOAL_SHARED_MEMORY, else to whether the system supports it; nodes of other hosts are
        served as well. Nobody waits for nodes that may come `late`; a hub grants `places` to processes that
        ask for one.
        """
        if (addresses is None) == (store is None):
            raise ValueError("pass addresses, or a store in which the hubs publish theirs")
        config = GrpcConfig(
            rank,
            size,
            tuple(hubs),
            run_id,
            manifest,
            limit_bytes,
            timeout,
            failure_timeout,
            incarnation,
            patience,
            frozenset(late),
        )
        share = memory.choose(share_memory)
        directory = _HubAddresses(addresses, store, advertise)
        transport = cls(config, security, listen, directory, share, places)
        try:
            transport._meet(time.monotonic() + timeout)
        except BaseException:
            transport._abandon()
            raise
        return transport

    def __init__(
        self,
        config: GrpcConfig,
        security: Security,
        listen: str,
        directory: _HubAddresses,
        share: bool,
        places: Places | None = None,
    ) -> None:
        super().__init__(config.rank, config.size, config.limit_bytes)
        keep_freed_slices()
        self._config = config
        self._tracker = PeerTracker(self._arrived.put, self.reasons, self.incarnations)
        self._tracker.expect_later(config.late - {config.rank})
        self._wakeup = threading.Event()
        self._clients: dict[int, HubClient] = {}
        self._hub: Hub | None = None
        self._server: HubServer | None = None
        self._probe = MemoryProbe(share)
        try:
            if config.rank in config.hubs:
                self._hub = Hub(config, self._probe, self._tracker, self._decode, self._wakeup)
                self._server = HubServer(self._hub, config, security, listen, places)
                directory.publish(config.rank, self._server.address)
            for hub in config.dials:
                self._clients[hub] = HubClient(
                    hub, config, self._probe, security, directory.find, self._tracker, self._wakeup
                )
        except BaseException:
            self._abandon()
            raise

    @property
    def address(self) -> str | None:
        """Where a hub listens; None for other nodes."""
        return None if self._server is None else self._server.address

    async def close(self) -> None:
        """Say goodbye, wait until all have received it, release threads and ports. A frozen peer costs 5 s.

        The first hub stays, at most `timeout` seconds, while two other nodes may still need it to forward.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if self._hub is not None:
                self._hub.stop_joining()
            for _ in self.drain():  # frees room for senders that wait
                pass
            self._say_goodbye()
            if self._hub is not None:
                self._hub.close()
        finally:
            self._abandon()

    def _meet(self, deadline: float) -> None:
        clients = self._clients.values()
        if self._may_miss and not self._config.leaves:  # those that are there call within a second or two
            deadline = min(deadline, time.monotonic() + BACK_SECONDS)
        while (absent := self._absent()) and (seconds := deadline - time.monotonic()) > 0:
            for client in clients:
                if client.failure is not None and not self._may_miss:
                    raise PeerLost(client.failure)
            self._wakeup.wait(seconds)
            self._wakeup.clear()
        unheard = {hub: client.failure for hub, client in self._clients.items() if not client.is_ready}
        refused = [why for why in unheard.values() if why is not None]
        if refused and len(refused) == len(clients):
            raise PeerLost(refused[0])
        if absent and not self._may_miss:
            joined = (
                set() if self._hub is None else self._hub.joined()
            )  # and may have given up just before us
            raise missing(self.rank, absent - joined or absent, self._config.timeout, "join")
        for hub, why in unheard.items():
            self._tracker.lost(hub, why or "it did not answer when this node was back")
        if self._hub is not None:
            self._hub.start()

    @property
    def _may_miss(self) -> bool:
        """Whether this is a hub that is back, and goes on without those that have gone meanwhile."""
        return self._hub is not None and self._config.incarnation > 0

    def _absent(self) -> set[int]:
        absent = set() if self._hub is None else self._hub.absent()
        missed = [client for client in self._clients.values() if not client.is_ready]
        awaited = [client for client in missed if client.failure is None or not self._may_miss]
        return absent.union(*(client.absent for client in awaited))

    def _abandon(self) -> None:
        """Release everything, without a goodbye."""
        for client in self._clients.values():
            client.end()
        if self._hub is not None:
            self._hub.abandon()
        if self._server is not None:
            self._server.close()
        self._probe.retire()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + CLOSING_SECONDS
        for heard in [client.leave(self._goodbye(), CLOSING_SECONDS) for client in self._clients.values()]:
            if heard is not None:
                with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                    heard.exception(timeout=max(0.0, deadline - time.monotonic()))

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        if dst in self._config.expects and self._hub is not None:
            self._hub.transmit(dst, header, parts)
        elif dst in self._clients:
            self._clients[dst].transmit(dst, header, parts)
        else:
            self._tracker.note_contact(dst)
            self._clients[self._config.relay].transmit(dst, header, parts)

    def _taken(self, m: Message) -> Message:
        self._tracker.taken(m)
        if self._hub is not None:
            self._hub.taken(m)
        return m


class _HubAddresses:
    """The addresses of the hubs."""

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
        self._store.set(hub_key(rank), address)

    def find(self, rank: int) -> str | None:
        """The address of a hub; None if unknown. Asks the store each time: a hub may restart elsewhere."""
        if self._store is not None:
            try:
                if self._store.check([hub_key(rank)]):
                    self._addresses[rank] = self._store.get(hub_key(rank)).decode()
            except RuntimeError:  # the store is gone; the hub may still be at its old address
                pass
        return self._addresses.get(rank)
