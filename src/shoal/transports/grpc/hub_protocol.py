"""Protocol between a node and a hub: the calls, the settings to agree on, how messages are cut, deadlines.

Up, from a node to its hub: an envelope (a number, the destination with its session number, and a frame's
header), then the body. Down: records, each a number, a kind and a length, then that many bytes. A large body
is announced by a record and fetched by a call of its own. Numbers count from 1 in each direction, no gaps.
Between processes that share memory, a memory location may follow the header instead of a large body.
"""

from __future__ import annotations

import ctypes
import hmac
import re
import secrets
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES
from shoal.transports.frames import BufferPool, Shape, bytes_of
from shoal.transports.grpc.control_pb2 import JoinRequest

PROTOCOL = 3
"""Version of the calls. Nodes of different versions refuse each other."""

JOIN, POLL, FETCH, POST, PUSH = (f"/shoal.Hub/{call}" for call in ("Join", "Poll", "Fetch", "Post", "Push"))

MOVE = "/shoal.Hub/Move"
"""The call by which a node goes on with its session on new connections."""

STAY = "/shoal.Hub/Stay"
"""The call that a node always has under way: if its process dies between two polls, the hub sees that end."""

PLACE = "/shoal.Hub/Place"
"""The call by which a process from elsewhere gets a place in the run, which it holds while the call lasts.

Up: what it asks, then its events. Down: what it is granted. Each is JSON.
"""

SLICE_BYTES = 2 << 20
"""A large body is sent in pieces of this size. Measured: 1 MiB is slower by a fifth, 4 MiB no faster."""

CALL_BYTES = 4 << 20
"""The largest gRPC message that is accepted."""

INLINE_BYTES = 256 << 10
"""A body up to this size is sent with its header, a larger one in slices."""

BATCH_BYTES = 1 << 20
"""A poll returns records until they exceed this size."""

HANDSHAKE_SECONDS = 5.0
"""How long a caller may take to prove that it belongs to the run."""

IDLE_SECONDS = 600.0
"""A connection without calls is closed after this long."""

SLOWEST = 1e6
"""Bytes per second. A slower peer is lost."""

WAITING, READY, PEERS_CHANGED, INLINE, LARGE, END = range(6)
"""Kinds of records.

WAITING: who has not joined yet. READY: all have joined; their states. PEERS_CHANGED: one joined or is gone.
INLINE: a message. LARGE: a message whose body is to be fetched. END: the hub disconnects.
"""

SESSION = "shoal-session"
"""Name of the metadata that carries a client's session key."""

LINE = "shoal-line"
"""Name of the metadata that says how often a client has replaced its connections."""

_RUN_ID = re.compile("[0-9a-f]{32}")
_ENVELOPE = struct.Struct("<QiI")
_RECORD = struct.Struct("<QBI")

Options = list[tuple[str, int]]


def channel_options(failure_timeout: float, patience: float | None) -> Options:
    """For a node that dials. Without its own pool, two channels to one address share a connection."""
    return [
        *_options(failure_timeout, patience),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("SingleThreadedUnaryStream", 1),  # reads streams in the caller's thread: a fifth faster
    ]


def server_options(config: GrpcConfig) -> Options:
    """For a hub. It must allow the keepalive pings of its clients, and must not share its port."""
    return [
        *_options(config.failure_timeout, config.patience),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(config.failure_timeout / 10)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
    ]


def _options(failure_timeout: float, patience: float | None) -> Options:
    timeout = _milliseconds(failure_timeout + (patience or 0.0))  # later than our own deadlines
    return [
        ("grpc.keepalive_time_ms", _milliseconds(failure_timeout / 5)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # default: a frozen peer is noticed after a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", CALL_BYTES),
        ("grpc.max_receive_message_length", CALL_BYTES),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


@dataclass(frozen=True)
class GrpcConfig:
    """One node's settings. All nodes have the same, except for `rank` and `incarnation`.

    Nobody waits for the nodes that may come `late`, when the run is under way. A peer that is silent for
    `silence_seconds` is lost.
    """

    rank: int
    size: int
    hubs: tuple[int, ...]
    run_id: str = field(repr=False)  # without a token, this is what admits a node
    manifest: str
    limit_bytes: int
    timeout: float
    failure_timeout: float
    incarnation: int = 0
    patience: float | None = None
    late: frozenset[int] = frozenset()
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} is not one of the {self.size} nodes")
        if not self.hubs or len({*self.hubs}) < len(self.hubs) or not {*self.hubs} <= {*range(self.size)}:
            raise ValueError(f"hubs={self.hubs} must name one or more different ranks below {self.size}")
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError("run_id must be 32 hexadecimal digits, as secrets.token_hex(16) makes them")
        if min(self.limit_bytes, self.timeout, self.failure_timeout) <= 0 or self.incarnation < 0:
            raise ValueError(f"limit_bytes, timeout and failure_timeout must be positive: {self}")

    @property
    def silence_seconds(self) -> float:
        """Seconds of silence after which a peer is lost.

        A peer may be silent for the failure timeout. From then on it is waited for during `patience`, by
        default half the failure timeout.
        """
        half = self.failure_timeout / 2
        return self.failure_timeout + (half if self.patience is None else self.patience)

    def call_seconds(self, nbytes: int = 0) -> float:
        """Seconds that a call carrying `nbytes` may take."""
        return self.silence_seconds + self.failure_timeout / 2 + nbytes / SLOWEST

    @property
    def relay(self) -> int:
        """The hub that forwards messages between nodes without a connection."""
        return self.hubs[0]

    @property
    def leaves(self) -> frozenset[int]:
        """The nodes that are not hubs."""
        return frozenset(range(self.size)) - {*self.hubs}

    @property
    def dials(self) -> tuple[int, ...]:
        """The hubs that this node calls: all of them, or those before it if it is a hub."""
        return self.hubs if self.rank not in self.hubs else self.hubs[: self.hubs.index(self.rank)]

    @property
    def expects(self) -> frozenset[int]:
        """The nodes that call this one."""
        if self.rank not in self.hubs:
            return frozenset()
        return self.leaves | {*self.hubs[self.hubs.index(self.rank) + 1 :]}

    def join_request(self) -> JoinRequest:
        """How this node introduces itself, without its memory probe."""
        return JoinRequest(
            protocol=PROTOCOL,
            run_id=self.run_id,
            manifest=self.manifest,
            size=self.size,
            hubs=self.hubs,
            limit_bytes=self.limit_bytes,
            failure_timeout=self.failure_timeout,
            rank=self.rank,
            incarnation=self.incarnation,
            nonce=self.nonce,
        )

    def objection(self, theirs: JoinRequest) -> str | None:
        """Why a node with these settings cannot join; None if it can. Never reveals the run id."""
        if not hmac.compare_digest(theirs.run_id.encode(), self.run_id.encode()):
            return "the run ids differ: this is another run"
        ours = self.join_request()
        for name in ("protocol", "size", "hubs", "limit_bytes", "failure_timeout", "manifest"):
            their, our = getattr(theirs, name), getattr(ours, name)
            if their != our:
                return f"node {theirs.rank} has {name} {their!r}, node {self.rank} has {our!r}"
        if theirs.rank not in self.expects:
            return f"node {self.rank} does not expect a call from node {theirs.rank}"
        return None


@cache
def keep_freed_slices() -> None:
    """Let malloc keep the memory of a few slices, which gRPC allocates and frees for each slice.

    Otherwise the kernel clears that memory anew each time: a fifth of all work. Applies to the whole
    process, and costs at most 16 MiB per thread that moves slices. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # constants of malloc.h
        mallopt(mmap_threshold, 2 * SLICE_BYTES)
        mallopt(trim_threshold, 8 * SLICE_BYTES)


class Envelope(NamedTuple):
    """The start of a message to a hub. `session_number` says which session of `dst` is meant."""

    number: int
    dst: int
    session_number: int
    header: memoryview | bytes

    def pack(self) -> bytes:
        """The envelope as bytes."""
        return _ENVELOPE.pack(self.number, self.dst, self.session_number) + self.header

    @classmethod
    def open(cls, data: bytes) -> tuple[Envelope, memoryview]:
        """An envelope and the bytes after it. Raises WireError if it is truncated."""
        begin = _ENVELOPE.size
        if len(data) < begin + HEADER_BYTES:
            raise WireError(f"an envelope has at least {begin + HEADER_BYTES} bytes, got {len(data)}")
        number, dst, session_number = _ENVELOPE.unpack_from(data)
        rest = memoryview(data)[begin:]
        return cls(number, dst, session_number, rest[:HEADER_BYTES]), rest[HEADER_BYTES:]


def record(number: int, kind: int, body: bytes) -> bytes:
    """One record of the reply to a poll."""
    return _RECORD.pack(number, kind, len(body)) + body


def open_records(data: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Number, kind and body of each record in the reply to a poll. Raises WireError if one is truncated."""
    rest = memoryview(data)
    while rest:
        if len(rest) < _RECORD.size:
            raise WireError("a record is truncated")
        number, kind, length = _RECORD.unpack_from(rest)
        rest = rest[_RECORD.size :]
        if len(rest) < length:
            raise WireError(f"a record announces {length:,} bytes, {len(rest):,} came")
        yield number, kind, rest[:length]
        rest = rest[length:]


def slices(parts: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bodies of the parts in slices. Shares their memory; gRPC's serializer copies."""
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
    """The parts of a message, from the pieces of its body. Raises WireError unless the sizes match."""
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
        raise WireError(f"a message is {missing:,} bytes shorter than its header says")
    return tuple(part for part, _ in pairs)
