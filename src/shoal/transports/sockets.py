"""SocketTransport: TCP between the processes of one host, one connection for each pair of nodes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from shoal.core.transport import HEADER_BYTES, LEFT, Message
from shoal.transports.buffers import BufferPool
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.frames import bytes_of
from shoal.transports.rendezvous import Store, meet


class SocketTransport(Endpoint):
    """Frames over loopback TCP; tensors arrive in the buffer the kernel filled, without another copy.

    A thread for each peer reads all the time, so a sender never waits for the receiver's algorithm.
    A peer that takes nothing for `timeout` seconds counts as lost.
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
        host: str = "127.0.0.1",
    ) -> SocketTransport:
        """Join the `size` nodes that meet at `store`; returns when all are connected.

        The store is only the meeting point; use a fresh one, or a PrefixStore, for each run.
        Raises PeerLost naming the ranks that did not come within `timeout` seconds.
        """
        peers = meet(rank, size, store, timeout=timeout, host=host)
        return cls(rank, size, peers, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(
        self, rank: int, size: int, peers: dict[int, socket.socket], *, limit_bytes: int, timeout: float
    ) -> None:
        super().__init__(rank, size, limit_bytes)
        self._buffers = BufferPool()
        self._lines = {peer: _Line(sock, timeout) for peer, sock in peers.items()}
        self._readers = [
            threading.Thread(target=self._read, args=line, name=f"shoal {rank} from {line[0]}", daemon=True)
            for line in self._lines.items()
        ]
        for reader in self._readers:
            reader.start()

    async def close(self) -> None:
        """Say goodbye, read until every peer has hung up, release sockets and threads.

        Reading on matters: closing a socket with unread bytes resets it, which would destroy what
        this node sent last. Peers answer at once, whatever they compute; a frozen one costs 5 s.
        """
        if self._closing:
            return
        self._closing = True
        for peer, line in self._lines.items():
            line.be_patient(CLOSING_SECONDS)
            self._transmit(peer, self._goodbye(), ())
            line.finish()
        deadline = time.monotonic() + CLOSING_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        for line in self._lines.values():
            line.cut()  # wakes a reader that still waits
        for reader in self._readers:
            reader.join()
        for line in self._lines.values():
            line.sock.close()

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        try:
            self._lines[dst].write([memoryview(header), *map(bytes_of, parts)])
        except OSError as error:
            self.reasons.setdefault(dst, f"node {dst} does not take what it is sent: {error}")
            self._lines[dst].cut()  # its reader finds the end and announces it

    def _read(self, peer: int, line: _Line) -> None:
        """Deliver all that comes from `peer`, then the notice that nothing more does."""
        try:
            while (message := self._read_message(peer, line.sock)).tag != LEFT:
                self._arrived.put(message)
        except Exception as error:  # whatever it was: a silent end would be worse
            self._announce(peer, error)
            line.cut()
        else:
            self._announce(peer, None)
            line.finish()  # the peer is closing and reads until it sees this

    def _read_message(self, peer: int, sock: socket.socket) -> Message:
        header = bytearray(HEADER_BYTES)
        _fill(sock, memoryview(header))
        message, shapes = self._decode(peer, header)
        parts = []
        for dtype, elements in shapes:
            part, memory = self._buffers.empty(dtype, elements)
            _fill(sock, memory)
            parts.append(part)
        message.parts = tuple(parts)
        return message


class _Line:
    """One connection. Its lock keeps frames whole; once finished it is silent."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._open = True
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.be_patient(timeout)

    def be_patient(self, seconds: float) -> None:
        """Let a write fail after this long without any progress; reads wait for ever."""
        whole, fraction = divmod(seconds, 1.0)
        timeval = struct.pack("ll", int(whole), int(fraction * 1e6))
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Send all of it, or nothing once the line is finished. After an error nothing more is sent."""
        with self._lock:
            if not self._open:
                return
            self._open = False  # until the frame is whole: whoever interrupts it has broken the stream
            pending = deque(buffers)
            while pending:
                sent = self.sock.sendmsg(pending)
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.popleft())
                if sent:
                    pending[0] = pending[0][sent:]
            self._open = True

    def finish(self) -> None:
        """No more writes; the peer reads an end of file after what was sent."""
        with self._lock:
            self._open = False
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End both directions at once, even under a write that hangs."""
        self._open = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        received = sock.recv_into(memory, flags=socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("it closed the connection without a goodbye")
        memory = memory[received:]
