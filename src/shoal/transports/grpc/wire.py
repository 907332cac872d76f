"""What travels between a node and a hub: the calls there are, how messages are cut, how long a call may take.

Up, from a node to its hub: an envelope, which is a number, a destination with the number of its stay, and a
frame's header; then the body. Down: records, each of them a number, a kind and a length, then that many
bytes. A large body is only announced in a record and fetched by a call of its own. Numbers count from 1 in
each direction, without a gap. Where both ends share memory a large body may lie there: the header says so,
and a place follows instead.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES
from shoal.transports.buffers import BufferPool
from shoal.transports.frames import Shape, bytes_of

PROTOCOL = 2
"""Version of the calls. Nodes of different versions do not meet."""

JOIN, POLL, FETCH, POST, PUSH = (f"/shoal.Hub/{call}" for call in ("Join", "Poll", "Fetch", "Post", "Push"))

SLICE_BYTES = 2 << 20
"""A large body travels in pieces of this size. Measured: 1 MiB is slower by a fifth, 4 MiB no faster."""

CALL_BYTES = 4 << 20
"""Nothing larger is accepted at once, whatever it is."""

WHOLE_BYTES = 256 << 10
"""A body up to this size travels with its header, a larger one in slices."""

BATCH_BYTES = 1 << 20
"""A poll brings at most this much at once, and one record more."""

HANDSHAKE_SECONDS = 5.0
"""How long a stranger may take to prove that it belongs to the run."""

IDLE_SECONDS = 600.0
"""A connection without any call is closed after this long."""

SLOWEST = 1e6
"""Bytes a second. Who cannot do that much counts as lost."""

WAITING, READY, NEWS, WHOLE, BULK, END = range(6)
"""Kinds of records.

WAITING: who has not come yet. READY: all are there, and this is how they are. NEWS: one of them came or went.
WHOLE: a message. BULK: a message whose body is to be fetched. END: the hub hangs up.
"""

_ENVELOPE = struct.Struct("<QiI")
_RECORD = struct.Struct("<QBI")

Options = list[tuple[str, int]]


def patience(failure_timeout: float, nbytes: int = 0) -> float:
    """Seconds that a call with so much in it may take."""
    return 2 * failure_timeout + nbytes / SLOWEST


def silence(failure_timeout: float) -> float:
    """Seconds without a sign of life after which a peer is lost; it is noticed a little later."""
    return 1.5 * failure_timeout


def channel_options(failure_timeout: float) -> Options:
    """For a node that dials. Without its own pool, two channels to one address would share a connection."""
    return [
        *_options(failure_timeout),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("SingleThreadedUnaryStream", 1),  # reads a stream in the caller's thread: a fifth faster
    ]


def server_options(failure_timeout: float) -> Options:
    """For a hub. It must allow the pings that it asks for, and shares its port with nobody."""
    return [
        *_options(failure_timeout),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(failure_timeout / 10)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
    ]


def _options(failure_timeout: float) -> Options:
    timeout = _milliseconds(failure_timeout)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(failure_timeout / 5)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # or else a frozen peer is noticed after a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", CALL_BYTES),
        ("grpc.max_receive_message_length", CALL_BYTES),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


@cache
def keep_freed_slices() -> None:
    """Have malloc keep the memory of a few slices, which gRPC takes and frees for each of them.

    Without this the system clears that memory anew every time: a fifth of all the work. It holds for the
    whole process, and costs at most 16 MiB for each thread that moves slices. Nothing happens without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers them
        mallopt(mmap_threshold, 2 * SLICE_BYTES)
        mallopt(trim_threshold, 8 * SLICE_BYTES)


class Envelope(NamedTuple):
    """How a message begins on its way up. `stay` tells which `dst` is meant, if it came more than once."""

    number: int
    dst: int
    stay: int
    header: memoryview | bytes

    def pack(self) -> bytes:
        """The envelope as bytes."""
        return _ENVELOPE.pack(self.number, self.dst, self.stay) + self.header

    @classmethod
    def open(cls, data: bytes) -> tuple[Envelope, memoryview]:
        """An envelope and the bytes after it. Raises WireError if it is not all there."""
        begin = _ENVELOPE.size
        if len(data) < begin + HEADER_BYTES:
            raise WireError(f"an envelope has at least {begin + HEADER_BYTES} bytes, got {len(data)}")
        number, dst, stay = _ENVELOPE.unpack_from(data)
        rest = memoryview(data)[begin:]
        return cls(number, dst, stay, rest[:HEADER_BYTES]), rest[HEADER_BYTES:]


def record(number: int, kind: int, body: bytes) -> bytes:
    """One entry of the answer to a poll."""
    return _RECORD.pack(number, kind, len(body)) + body


def open_records(data: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Number, kind and body of each record in the answer to a poll. Raises WireError where one is cut off."""
    rest = memoryview(data)
    while rest:
        if len(rest) < _RECORD.size:
            raise WireError("a record is cut off")
        number, kind, length = _RECORD.unpack_from(rest)
        rest = rest[_RECORD.size :]
        if len(rest) < length:
            raise WireError(f"a record announces {length:,} bytes, {len(rest):,} came")
        yield number, kind, rest[:length]
        rest = rest[length:]


def slices(parts: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bodies of the parts, one after the other, in pieces. Shares their memory; the serializer copies."""
    for part in parts:
        memory = bytes_of(part)
        for begin in range(0, len(memory), SLICE_BYTES):
            yield memory[begin : begin + SLICE_BYTES]


def size_of(shapes: Sequence[Shape]) -> int:
    """Bytes of a body with these shapes."""
    return sum(dtype.itemsize * elements for dtype, elements in shapes)


def fill(
    shapes: Sequence[Shape], pieces: Iterable[bytes | memoryview], buffers: BufferPool
) -> tuple[Tensor, ...]:
    """The parts of a message, from the pieces of its body. Raises WireError unless they make exactly that."""
    pairs = [buffers.empty(dtype, elements) for dtype, elements in shapes]
    empty = deque(memory for _, memory in pairs if memory)
    missing = size_of(shapes)
    for piece in pieces:
        if len(piece) > missing:
            raise WireError("a message is longer than its header says")
        missing -= len(piece)
        rest = memoryview(piece)
        while rest:
            n = min(len(rest), len(empty[0]))
            empty[0][:n] = rest[:n]
            rest = rest[n:]
            empty[0] = empty[0][n:]
            if not empty[0]:
                empty.popleft()
    if missing:
        raise WireError(f"a message ended {missing:,} bytes before its end")
    return tuple(part for part, _ in pairs)
