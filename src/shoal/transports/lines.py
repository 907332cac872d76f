"""Line: one connection between two processes, and the memory that large messages take beside it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from shoal.transports.frames import Place, bytes_of, encode_elsewhere
from shoal.transports.lobby import Contact
from shoal.transports.parcels import Mappings, Outbox


class Line:
    """A connection to one incarnation of a peer. Its lock keeps frames whole; once finished it is silent."""

    def __init__(self, contact: Contact, limit_bytes: int, timeout: float) -> None:
        self.sock = contact.sock
        self.incarnation = contact.incarnation
        self.outbox = Outbox(limit_bytes) if contact.pid else None
        self.mappings = Mappings(contact.pid, limit_bytes) if contact.pid else None
        self.reader: threading.Thread  # set by whoever delivers what it reads
        self.is_over = False  # nothing more comes from the peer
        self.complaint = ""  # why it was cut, where a write was the reason
        self._lock = threading.Lock()
        self._open = True
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a write fails after this long without any progress; reads wait for ever
        timeval = struct.pack("ll", int(timeout), int(timeout % 1.0 * 1e6))
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, header: bytes, parts: Sequence[Tensor]) -> None:
        """Send a message, by way of memory where it is large and a buffer is free."""
        if self.outbox is not None:
            header, parts = self.outbox.wrap(header, parts)
        self.write([memoryview(header), *map(bytes_of, parts)])

    def send_place(self, header: bytes, place: Place, parts: Sequence[Tensor] = ()) -> None:
        """Send a message whose parts lie elsewhere; those of a copy follow."""
        self.write([memoryview(encode_elsewhere(header, place)), *map(bytes_of, parts)])

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Send all of it, or nothing once the line is finished. A peer that does not take it is cut off."""
        with self._lock:
            if not self._open:
                return
            try:
                self._open = False  # until the frame is whole: whoever interrupts it has broken the stream
                self._write_all(deque(buffers))
                self._open = True
            except OSError as error:
                self.complaint = f"it does not take what it is sent: {error}"
                self.cut()  # its reader finds the end and announces it
            except BaseException:
                self.complaint = "a message to it was interrupted"
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
        """The next so many bytes."""
        taken = bytearray(nbytes)
        self.fill(memoryview(taken))
        return taken

    def fill(self, memory: memoryview) -> None:
        """Read until the memory is full. Raises ConnectionError if the peer hangs up first."""
        while memory:
            received = self.sock.recv_into(memory, flags=socket.MSG_WAITALL)
            if received == 0:
                raise ConnectionError("it closed the connection without a goodbye")
            memory = memory[received:]

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

    def forget_memory(self) -> None:
        """Let go of all memory that was shared over this line; what is still looked at stays by itself."""
        if self.outbox is not None:
            self.outbox.close()
        if self.mappings is not None:
            self.mappings.clear()

    def close(self) -> None:
        """Release the socket, once nobody reads any more."""
        with self._lock:  # a write that hung has been cut
            self.sock.close()
