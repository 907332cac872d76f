"""Frames: a message as bytes. A header of fixed size, then the elements of each part as they lie in memory.

    offset  bytes  field, little-endian
         0      4  magic
         4      1  version of this layout
         5      1  number of parts
         6      2  incarnation
         8     16  tag: printable ascii, padded with zeros
        24      4  src
        28      8  seq
        36      8  count
        44      8  version
        52      8  rate
        60      8  clock
        68     36  four times: code of the dtype (1), number of elements (8); zeros where there is no part

The header says how much follows, so a reader checks the size before it allocates anything. Nothing is ever
unpickled. There is no checksum: docs/transports.md says why.

Between processes that share memory, another magic announces that a memory location follows instead of the
elements:

    offset  bytes  field, little-endian
         0      1  kind: large message 1, shared read 2, copy 3, window 4, large message on a GPU 5, shown 6;
                   after a copy the elements follow
         1      4  number of the sender's open file
         5      8  serial number of the memory in it
        13      8  offset of the first part
        21      4  slot of the shared read
        25      8  number of the large message, the shared read or the revision
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import DTYPES, HEADER_BYTES, MOST_PARTS, TAG_BYTES, Message

MAGIC = b"SHOL"
VERSION = 2

_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}  # 0 means "no part"
_LAYOUT = struct.Struct("<4sBBH16siqdqdq" + MOST_PARTS * "BQ")
assert _LAYOUT.size == HEADER_BYTES

SHARED_MAGIC = b"SHOM"
"""The magic of a header that is followed by a memory location."""

LARGE_MESSAGE, SHARED_READ, COPY, WINDOW, GPU_MESSAGE, SHOWN = 1, 2, 3, 4, 5, 6

_LOCATION = struct.Struct("<BiQQIQ")
LOCATION_BYTES = _LOCATION.size


class MemoryLocation(NamedTuple):
    """Where the parts of a message lie in the sender's shared memory."""

    kind: int
    fd: int = -1
    serial: int = 0
    offset: int = 0
    slot: int = 0
    number: int = 0


Shape = tuple[torch.dtype, int]
"""Dtype and number of elements of one part."""


def flatten(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parts as they are sent: flat, contiguous, in host memory. Copies only where needed."""
    return flatten_in_place(to_host(parts))


def flatten_in_place(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parts flat and contiguous, on the device on which they are."""
    return tuple(part.detach().contiguous().view(-1) for part in parts)


def to_host(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parts in host memory. Copies only where needed."""
    return tuple(part.to("cpu") for part in parts)


def bytes_of(part: Tensor) -> memoryview:
    """The memory of a flat tensor, writable, shared with it."""
    return part.view(torch.uint8).numpy().data


def encode(m: Message, parts: Sequence[Tensor], src: int) -> bytes:
    """The header of `m` as sent by `src` with the flattened `parts`. Raises ValueError if it does not fit."""
    if len(parts) > MOST_PARTS:
        raise ValueError(
            f"message '{m.tag}' has {len(parts)} parts, at most {MOST_PARTS} fit. Concatenate some."
        )
    slots: list[int] = []
    for part in parts:
        if part.dtype not in _CODES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(
                f"message '{m.tag}' carries {part.dtype}, which cannot be sent. Use one of: {allowed}."
            )
        slots += (_CODES[part.dtype], part.numel())
    slots += [0] * (2 * MOST_PARTS - len(slots))
    try:
        return _LAYOUT.pack(
            *(MAGIC, VERSION, len(parts), m.incarnation, _pack_tag(m.tag), src, m.seq),
            *(m.count, m.version, m.rate, m.clock, *slots),
        )
    except struct.error as error:
        raise ValueError(f"a field of message '{m.tag}' does not fit the header ({error}): {m!r}") from error


def encode_location(header: bytes, location: MemoryLocation) -> bytes:
    """The header of a message whose parts lie at `location`, and the location."""
    return SHARED_MAGIC + header[len(MAGIC) :] + _LOCATION.pack(*location)


def decode_location(raw: bytes | bytearray | memoryview) -> MemoryLocation:
    """The location that follows such a header. Raises WireError for an unknown kind."""
    location = MemoryLocation(*_LOCATION.unpack(raw))
    if not LARGE_MESSAGE <= location.kind <= SHOWN:
        raise WireError(f"unknown kind of memory location {location.kind}")
    return location


def decode(header: bytes | bytearray | memoryview, limit_bytes: int) -> tuple[Message, list[Shape]]:
    """The message of a header, without its parts, and the shapes of those parts.

    Raises WireError for bytes that `encode` never writes, and for a payload above `limit_bytes`.
    """
    if len(header) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes, got {len(header)}")
    magic, layout, parts, incarnation, tag, src, seq, count, version, rate, clock, *slots = _LAYOUT.unpack(
        header
    )
    if magic != MAGIC:
        raise WireError(f"not a Shoal message: it begins with {magic!r}, not {MAGIC!r}")
    if layout != VERSION:
        raise WireError(f"the peer speaks version {layout} of the protocol, this node version {VERSION}")
    if src < 0:
        raise WireError(f"a message claims to come from node {src}")
    if not 0 <= count < inf:
        raise WireError(f"a message of node {src} claims a count of {count} samples")
    shapes = _unpack_shapes(parts, slots)
    nbytes = sum(dtype.itemsize * elements for dtype, elements in shapes)
    if nbytes > limit_bytes:
        raise WireError(f"a message of {nbytes:,} bytes exceeds the limit of {limit_bytes:,}")
    return Message(_unpack_tag(tag), (), src, seq, count, version, rate, clock, incarnation), shapes


def _pack_tag(tag: str) -> bytes:
    if not (0 < len(tag) <= TAG_BYTES and tag.isascii() and tag.isprintable()):
        raise ValueError(f"tag {tag!r} must be 1 to {TAG_BYTES} printable ascii characters")
    return tag.encode("ascii")


def _unpack_tag(raw: bytes) -> str:
    text = raw.rstrip(b"\0")
    if not (text and text.isascii() and (tag := text.decode("ascii")).isprintable()):
        raise WireError(f"tag {raw!r} is not printable ascii")
    return tag


def _unpack_shapes(parts: int, slots: Sequence[int]) -> list[Shape]:
    if parts > MOST_PARTS:
        raise WireError(f"a message announces {parts} parts, at most {MOST_PARTS} fit")
    codes, elements = slots[::2], slots[1::2]
    if any(codes[parts:]) or any(elements[parts:]):
        raise WireError(f"a message of {parts} parts describes more than {parts}")
    for code in codes[:parts]:
        if not 1 <= code <= len(DTYPES):
            raise WireError(f"unknown dtype code {code}")
    return [(DTYPES[code - 1], n) for code, n in zip(codes[:parts], elements[:parts], strict=True)]


SMALLEST_RECYCLED = 64 * 1024
"""Below this many bytes a fresh allocation is cheaper than recycling."""

MOST_FREE_BUFFERS = 8
"""Free buffers kept; one more releases the buffer that was idle longest."""


class BufferPool:
    """Recycles memory for incoming messages. Thread-safe.

    A buffer is free again when the storage over it dies, not the tensor: a slice that outlives its
    tensor keeps the buffer.
    """

    def __init__(self) -> None:
        # Deque operations are atomic. A lock would deadlock: a finalizer may run at any allocation, also
        # inside `_take`, and would then wait for its own thread.
        self._free: deque[Tensor] = deque(maxlen=MOST_FREE_BUFFERS)

    def empty(self, dtype: torch.dtype, elements: int) -> tuple[Tensor, memoryview]:
        """An uninitialised flat tensor, and its memory to write into."""
        nbytes = dtype.itemsize * elements
        if nbytes < SMALLEST_RECYCLED:
            fresh = torch.empty(elements, dtype=dtype)
            return fresh, bytes_of(fresh)
        memory = self._take(nbytes)
        export = memory.numpy()  # a new object each time; the storage made by frombuffer references it
        weakref.finalize(export, self._free.append, memory).atexit = False
        return torch.frombuffer(export, dtype=dtype), bytes_of(memory)

    def _take(self, nbytes: int) -> Tensor:
        for _ in range(MOST_FREE_BUFFERS):
            try:
                candidate = self._free.popleft()
            except IndexError:
                break
            if candidate.numel() == nbytes:
                return candidate
            self._free.append(candidate)
        return torch.empty(nbytes, dtype=torch.uint8)
