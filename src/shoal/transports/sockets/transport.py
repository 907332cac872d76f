"""SocketTransport: the processes of one host, with one TCP connection per pair of nodes and shared memory."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.errors import Unavailable, WireError
from shoal.core.transport import HEADER_BYTES, JOINED, LEFT, Message
from shoal.transports import frames
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.frames import (
    COPY,
    GPU_MESSAGE,
    LARGE_MESSAGE,
    LOCATION_BYTES,
    SHARED_READ,
    SHOWN,
    BufferPool,
    MemoryLocation,
    Shape,
)
from shoal.transports.rendezvous import Store
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.gpu_memory import own_gpu
from shoal.transports.shared_memory.shared_reads import SharedReads, ShownMemory, start_read
from shoal.transports.shared_memory.windows import WindowTable
from shoal.transports.sockets.connections import Connection, connect_all
from shoal.transports.sockets.handshake import Handshaker, VerifiedSocket

_NO_WINDOWS = (
    "windows need shared memory, which this run does not use. Choose a strategy that sends messages."
)


class SocketTransport(Endpoint):
    """Frames over loopback TCP. Large tensors travel in shared memory and arrive as views on it.

    One thread per peer reads continuously, so a sender never waits for the receiver's algorithm.
    A peer that reads nothing for `timeout` seconds is lost. A lost peer may rejoin: a JOINED notice
    arrives, and messages sent to it before the algorithm receives that notice are dropped.
    """

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store: Store,
        *,
        limit_bytes: int,
        timeout: float = 60.0,
        meeting_seconds: float | None = None,
        host: str = "127.0.0.1",
        incarnation: int = 0,
        share_memory: bool | None = None,
    ) -> SocketTransport:
        """Connect to the `size` nodes that meet at `store`; returns when all are connected.

        Use a fresh store, or a PrefixStore, for each run. Raises PeerLost naming the ranks that did not
        come within `meeting_seconds`, by default `timeout`.

        A restarted node passes an `incarnation` higher than any before. Its `connect` returns when every
        peer has answered or is known to be gone; LOST notices name the latter. Raises PeerLost if a peer
        knows a later incarnation. `share_memory` defaults to the environment variable
        SHOAL_SHARED_MEMORY, else to whether the system supports it.
        """
        if not 0 <= incarnation < 1 << 16:
            raise ValueError(f"incarnation={incarnation} must be 0 to 65535")
        share = memory.choose(share_memory)
        patience = timeout if meeting_seconds is None else meeting_seconds
        handshaker = connect_all(
            rank, size, store, timeout=patience, host=host, incarnation=incarnation, share=share
        )
        return cls(handshaker, store, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(self, handshaker: Handshaker, store: Store, *, limit_bytes: int, timeout: float) -> None:
        credentials = handshaker.credentials
        super().__init__(credentials.rank, credentials.size, limit_bytes)
        self.incarnation = credentials.incarnation
        self.shares_memory = credentials.probe.shares
        self.timeout = timeout
        # Restarted nodes need it, and a FileStore deletes its file when the last node drops it.
        self._store: Store | None = store
        self._gpu = own_gpu()  # here: other threads have no GPU of their own
        self._buffers = BufferPool()
        self._shared_reads = SharedReads()
        self._windows = WindowTable(self.rank, timeout)
        self._connections: dict[int, Connection] = {}  # the latest to each peer
        self._reachable: dict[int, Connection] = {}  # those the algorithm knows of
        self._rejoined: dict[tuple[int, int], Connection] = {}  # the algorithm has not read JOINED yet
        for peer, why in handshaker.unreachable.items():
            self._announce(peer, ConnectionError(why))
        for peer, verified in handshaker.take_verified().items():
            self._reachable[peer] = self._new_connection(peer, verified)
            self.incarnations[peer] = verified.incarnation
        for connection in self._reachable.values():
            connection.reader.start()
        self._handshaker = handshaker
        self._acceptor = threading.Thread(
            target=handshaker.serve,
            args=(self._replace_connection,),
            name=f"shoal {self.rank} accept",
            daemon=True,
        )
        self._acceptor.start()

    async def close(self) -> None:
        """Say goodbye, read until every peer has disconnected, release sockets, memory and threads.

        Reading on matters: closing a socket with unread bytes resets it, which would destroy the last
        messages of this node. Peers answer at once, whatever they compute; all frozen ones together cost 5 s.
        """
        if self._closing:
            return
        deadline = time.monotonic() + CLOSING_SECONDS
        self._shared_reads.reclaim(CLOSING_SECONDS / 2)
        self._closing = True
        self._handshaker.stop()
        self._acceptor.join()
        self._say_goodbye(deadline)
        for connection in self._connections.values():
            connection.reader.join(max(0.0, deadline - time.monotonic()))
        for connection in self._connections.values():
            connection.cut()  # wakes a reader that is still blocked
            connection.reader.join()
            connection.close()
        self._handshaker.close()
        self._shared_reads.close()
        self._windows.close()
        self._store = None

    def _say_goodbye(self, deadline: float) -> None:
        """Send a goodbye to each peer as soon as its socket is writable, so a frozen one delays nobody."""
        with selectors.DefaultSelector() as selector:
            for connection in self._connections.values():
                selector.register(connection.sock, selectors.EVENT_WRITE, connection)
            while selector.get_map() and (able := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in able:
                    selector.unregister(key.fileobj)
                    key.data.send(self._goodbye(), ())
                    key.data.finish()

    # -- zero-copy reads -----------------------------------------------------------------------

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like` that peers can read in place; an ordinary copy if memory is not shared.

        Raises Unavailable if the system has not enough memory.
        """
        if not self.shares_memory or like.numel() == 0:
            return like.detach().to("cpu", copy=True)
        if like.nbytes > self.limit_bytes:
            raise ValueError(f"share: {like.nbytes:,} bytes, but limit_bytes is {self.limit_bytes:,}")
        try:
            return self._shared_reads.share(like)
        except OSError as error:
            raise Unavailable(f"no shared memory for {like.nbytes:,} bytes: {error}") from error

    async def lend(self, dst: int, m: Message) -> None:
        """Let `dst` read the only part of `m`, which came from `share`, in place. Does not wait.

        Do not change the tensor before `reclaim` returns. A reader whose `release` returns True after its
        copy has copied a consistent state: see shared_reads.py. Where memory is not shared, a copy is
        sent, which is always consistent.
        """
        header, parts = self._checked(dst, m)
        if len(parts) != 1:
            raise ValueError(f"message '{m.tag}' has {len(parts)} parts; lend() takes exactly one")
        if dst == self.rank:
            self._arrived.put(replace(m, parts=(parts[0].clone(),), src=self.rank, release=_is_consistent))
            return
        connection = self._reachable.get(dst)
        if connection is None or connection.is_over:
            return
        location = None
        if connection.mappings is not None and parts[0].numel() > 0:
            location = self._shared_reads.lend(m.parts[0], lambda: connection.is_over)
        if location is None:
            connection.send_location(header, MemoryLocation(COPY), frames.to_host(parts))
        else:
            connection.send_location(header, location)

    async def reclaim(self, timeout: float | None = None) -> None:
        """Wait until nobody reads lent memory. Reads that last longer than `timeout` seconds are revoked.

        The default is the transport's own timeout. Lost readers are not waited for.
        """
        self._shared_reads.reclaim(self.timeout if timeout is None else timeout)

    # -- memory that peers map for good ----------------------------------------------------------

    def can_show(self, dst: int) -> bool:
        """Whether this node and `dst` can map each other's memory."""
        connection = self._reachable.get(dst)
        return self.shares_memory and connection is not None and connection.mappings is not None

    async def show(self, dst: int, m: Message) -> None:
        """Let `dst` map the only part of `m`, which came from `share`. Nothing happens if it is gone.

        Raises ValueError if it cannot map it: ask `can_show` before.
        """
        header, (part,) = self._checked(dst, m)
        connection = self._reachable.get(dst)
        if connection is None or connection.is_over:
            return
        if connection.mappings is None:
            raise ValueError(f"node {dst} cannot map memory of node {self.rank}; use send()")
        connection.send_location(header, self._shared_reads.show(part))

    def revise(self, shown: Tensor) -> None:
        """Tell all who have mapped it that this memory changes from now on."""
        self._shared_reads.revise(shown)

    # -- windows -------------------------------------------------------------------------------

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose a copy of the owner's `x` to all nodes; all call this together. One window per owner.

        Raises Unavailable if memory is not shared, PeerLost if the owner opens no window within the
        timeout, and ValueError if the dtype or length differs; a node that will not use the window may pass
        an empty vector. The owner may read its vector at any time, but changes it by `accumulate` only.
        """
        if owner == self.rank:
            return self._open_own_window(x)
        connection = self._connections.get(owner)
        if not self.shares_memory or (connection is not None and connection.mappings is None):
            raise Unavailable(_NO_WINDOWS)
        window = self._windows.await_window(owner, lambda: self._is_gone(owner))
        if x.numel():
            window.check(x)
        return x

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy the exposed vector into `out`; returns the number of additions finished before.

        Each element is consistent, but different elements may stem from different moments. Raises PeerLost
        if the owner is gone.
        """
        return self._windows.find(owner).fetch(out)

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to the exposed vector; returns the number of additions finished before. None is ever lost.

        Stripes where `v` is zero are neither locked nor written. Raises PeerLost if the owner is gone, or if
        another node holds a stripe for the whole timeout; some stripes may have been added then.
        """
        return self._windows.find(owner).add(v)

    def _open_own_window(self, x: Tensor) -> Tensor:
        if not self.shares_memory:
            raise Unavailable(_NO_WINDOWS)
        if x.nbytes > self.limit_bytes:
            raise ValueError(f"a window of {x.nbytes:,} bytes, but limit_bytes is {self.limit_bytes:,}")
        window = self._windows.open_own(x)
        for connection in list(self._connections.values()):
            self._send_window(connection)
        return window.vector.view(x.shape)

    def _send_window(self, connection: Connection) -> None:
        own = self._windows.own
        if own is not None and connection.mappings is not None:
            vector, location = own
            connection.send_location(frames.encode(Message("window"), (vector,), self.rank), location)

    # -- rejoining -----------------------------------------------------------------------------

    def _replace_connection(self, peer: int, verified: VerifiedSocket) -> None:
        """Replace the connection of a peer that was restarted."""
        before = self._connections.get(peer)
        if before is not None:
            before.cut()
            before.reader.join()  # it has announced the loss by now
            before.close()
        connection = self._new_connection(peer, verified)
        self._rejoined[peer, verified.incarnation] = connection
        self._arrived.put(Message(JOINED, src=peer, incarnation=verified.incarnation))
        connection.reader.start()
        self._send_window(connection)

    def _taken(self, m: Message) -> Message:
        if m.tag == JOINED:
            # Only now: earlier messages were meant for the previous incarnation.
            self._reachable[m.src] = self._rejoined.pop((m.src, m.incarnation))
        return m

    def _new_connection(self, peer: int, verified: VerifiedSocket) -> Connection:
        connection = Connection(verified, self.limit_bytes, self.timeout, self._gpu)
        name = f"shoal {self.rank} from {peer}"
        connection.reader = threading.Thread(
            target=self._read, args=(peer, connection), name=name, daemon=True
        )
        self._connections[peer] = connection
        return connection

    def _is_gone(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        return connection is None or connection.is_over

    # -- moving bytes --------------------------------------------------------------------------

    def _flatten(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return frames.flatten_in_place(parts)  # a connection knows how those on a GPU travel

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        connection = self._reachable.get(dst)
        if connection is not None:
            connection.send(header, parts)

    def _read(self, peer: int, connection: Connection) -> None:
        """Deliver all messages from `peer`, then LEFT or LOST."""
        failure: Exception | None = None
        try:
            while self._deliver_next(peer, connection):
                pass  # keep no reference: a message in a variable here would hold its buffer
        except Exception as error:  # any error: a silent end would be worse
            failure = ConnectionError(
                connection.write_error or str(error)
            )  # afresh: that one holds on to this frame
        connection.is_over = True
        connection.release_memory()
        self._windows.remove(peer)
        self.reasons.pop(peer, None)  # of an earlier incarnation
        self._announce(peer, failure)
        if failure is None:
            connection.finish()  # the peer is closing and reads until it sees this
        else:
            connection.cut()

    def _deliver_next(self, peer: int, connection: Connection) -> bool:
        """Deliver one message. False after a goodbye."""
        message = self._read_message(peer, connection)
        if message is not None and message.tag == LEFT:
            return False
        if message is not None:
            self._arrived.put(message)
        return True

    def _read_message(self, peer: int, connection: Connection) -> Message | None:
        """The next message; None if it was for the transport itself (a window)."""
        header = connection.take(HEADER_BYTES)
        location = None
        if header.startswith(frames.SHARED_MAGIC):
            location = frames.decode_location(connection.take(LOCATION_BYTES))
            header[: len(frames.MAGIC)] = frames.MAGIC
        message, shapes = self._decode(peer, header)
        if location is None:
            message.parts = self._read_parts(connection, shapes)
        elif location.kind == COPY:
            message.parts, message.release = self._read_parts(connection, shapes), _is_consistent
        elif connection.mappings is None:
            raise WireError(f"node {peer} refers to shared memory, but shares none with node {self.rank}")
        elif location.kind in (LARGE_MESSAGE, GPU_MESSAGE):
            message.parts = connection.mappings.read(location, shapes)
        elif location.kind == SHARED_READ:
            message.parts, message.release = start_read(connection.mappings.at(location), location, shapes)
        elif location.kind == SHOWN:
            shown = connection.mappings.at(location)
            message.parts = shown.tensors(shapes, location.offset)
            message.release = ShownMemory(shown, location.number)
        else:
            self._windows.register(peer, connection.mappings.open(location), shapes)
            return None
        return message

    def _read_parts(self, connection: Connection, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        parts = []
        for dtype, elements in shapes:
            part, room = self._buffers.empty(dtype, elements)
            connection.fill(room)
            parts.append(part)
        return tuple(parts)


def _is_consistent() -> bool:
    return True
