"""Connections: one TCP connection between two processes, and how all nodes connect to each other."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from shoal.transports.frames import MemoryLocation, bytes_of, encode_location, to_host
from shoal.transports.rendezvous import Store, await_keys, missing
from shoal.transports.shared_memory.large_messages import Mappings, SendBuffers
from shoal.transports.shared_memory.memory import MemoryProbe
from shoal.transports.sockets.handshake import Credentials, Handshaker, VerifiedSocket, listen

_TOKEN_KEY = "shoal/token"


class Connection:
    """A connection to one incarnation of a peer. A lock keeps frames whole; `finish` ends sending."""

    def __init__(
        self, verified: VerifiedSocket, limit_bytes: int, timeout: float, gpu: int | None = None
    ) -> None:
        self.sock = verified.sock
        self.incarnation = verified.incarnation
        self.send_buffers = SendBuffers(limit_bytes, verified.pid) if verified.pid else None
        self.mappings = Mappings(verified.pid, limit_bytes, gpu) if verified.pid else None
        self.reader: threading.Thread  # set by the transport, which delivers what this thread reads
        self.is_over = False  # the peer sends nothing more
        self.write_error = ""  # why the connection was cut, if a write failed
        self._lock = threading.Lock()
        self._open = True
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a write fails after `timeout` without progress; reads wait without limit
        timeval = struct.pack("ll", int(timeout), int(timeout % 1.0 * 1e6))
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, header: bytes, parts: Sequence[Tensor]) -> None:
        """Send a message; a large one through shared memory if a buffer is free."""
        if self.send_buffers is not None:
            header, parts = self.send_buffers.wrap(header, parts)
        self.write([memoryview(header), *map(bytes_of, to_host(parts))])

    def send_location(self, header: bytes, location: MemoryLocation, parts: Sequence[Tensor] = ()) -> None:
        """Send a message whose parts lie in shared memory, or follow if the location's kind is COPY."""
        self.write([memoryview(encode_location(header, location)), *map(bytes_of, parts)])

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Send all buffers; do nothing once finished. A peer that stops reading is disconnected."""
        with self._lock:
            if not self._open:
                return
            try:
                self._open = False  # until the frame is complete: an interrupted write has broken the stream
                self._write_all(deque(buffers))
                self._open = True
            except OSError as error:
                self.write_error = f"it does not take what it is sent: {error}"
                self.cut()  # the reader sees the end of the stream and announces the loss
            except BaseException:
                self.write_error = "a message to it was interrupted"
                self.cut()
                raise

    def _write_all(self, pending: deque[memoryview]) -> None:
        while pending:
            sent = self.sock.sendmsg(pending)
            while pending and sent >= len(pending[0]):
                sent -= len(pending.popleft())
            if sent:
                pending[0] = pending[0][sent:]

    def take(self, nbytes: int) -> bytearray:
        """Read exactly `nbytes`."""
        taken = bytearray(nbytes)
        self.fill(memoryview(taken))
        return taken

    def fill(self, memory: memoryview) -> None:
        """Read until `memory` is full. Raises ConnectionError if the peer disconnects first."""
        while memory:
            received = self.sock.recv_into(memory, flags=socket.MSG_WAITALL)
            if received == 0:
                raise ConnectionError("it closed the connection without a goodbye")
            memory = memory[received:]

    def finish(self) -> None:
        """Stop writing; the peer reads an end of file after the last frame."""
        with self._lock:
            self._open = False
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End both directions at once, even during a blocked write."""
        self._open = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def release_memory(self) -> None:
        """Release the shared memory of this connection; tensors that view it keep their own mapping."""
        if self.send_buffers is not None:
            self.send_buffers.close()
        if self.mappings is not None:
            self.mappings.clear()

    def close(self) -> None:
        """Close the socket. Call it after the reader has ended."""
        with self._lock:  # a blocked write has been cut
            self.sock.close()


def connect_all(
    rank: int,
    size: int,
    store: Store,
    *,
    timeout: float,
    host: str,
    incarnation: int = 0,
    share: bool = False,
) -> Handshaker:
    """Connect to every other rank; both ends prove that they know the run's token.

    At first start, higher ranks dial lower ones and every rank must come: raises PeerLost naming the missing.
    A restarted node, incarnation 1 or later, dials every rank and skips those that do not answer. The store
    holds addresses and the token, so only the run's own user may read it. The returned Handshaker keeps
    listening for nodes that rejoin; the caller closes it.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as held:
        listener = held.enter_context(listen(host, size))
        probe = MemoryProbe(share)
        held.callback(probe.retire)
        _publish(store, rank, incarnation, f"{host} {listener.getsockname()[1]}")
        dialled = [r for r in range(size) if r < rank or (incarnation and r != rank)]
        if await_keys(store, {r: _address_key(r) for r in dialled}, timeout):
            absent = await_keys(store, {r: _address_key(r) for r in range(size)}, 0.0)
            raise missing(rank, absent, timeout, "come to the meeting point")
        token = bytes.fromhex(store.get(_TOKEN_KEY).decode())
        handshaker = Handshaker(Credentials(rank, size, token, incarnation, probe), listener)
        held.pop_all()
        held.callback(handshaker.close)
        for peer in dialled:
            handshaker.dial(peer, *_newest_address(store, peer))
        handshaker.await_all(deadline)
        if incarnation:
            handshaker.skip(handshaker.absent(), f"did not answer within {timeout:g} s")
        elif handshaker.absent():
            raise missing(rank, handshaker.absent(), timeout, "join the mesh")
        held.pop_all()
        return handshaker


def _publish(store: Store, rank: int, incarnation: int, address: str) -> None:
    if rank == 0 and not (incarnation and store.check([_TOKEN_KEY])):
        store.set(_TOKEN_KEY, secrets.token_hex(32))  # before the address: a node that sees that finds this
    store.set(_address_key(rank, incarnation), address)
    for earlier in reversed(range(incarnation)):  # no gaps, so that counting up finds the latest
        if not store.check([_address_key(rank, earlier)]):
            store.set(_address_key(rank, earlier), "")


def _newest_address(store: Store, rank: int) -> tuple[str, int]:
    """The address of the latest incarnation of `rank`, and the number of that incarnation."""
    incarnation = 0
    while store.check([_address_key(rank, incarnation + 1)]):
        incarnation += 1
    return store.get(_address_key(rank, incarnation)).decode(), incarnation


def _address_key(rank: int, incarnation: int = 0) -> str:
    return f"shoal/addr/{rank}/{incarnation}" if incarnation else f"shoal/addr/{rank}"
