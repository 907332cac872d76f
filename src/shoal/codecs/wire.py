"""The wire format: a header before what a codec writes, so that nothing else is taken for it.

    offset  bytes
    0       4      "shol"
    4       1      version, 1
    5       1      code of the codec
    6       2      0
    8       8      elements of the vector
    16      8      count: what the codec needs to know, as how many elements are sent
    24      8      checksum: the sum, modulo 2^64, of all 8-byte words of the bodies and of the three numbers

All little-endian. The bodies follow, each a flat tensor of a dtype and length that the codec knows from these
numbers, and checks before it reads.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from shoal.core.codec import Payload
from shoal.core.errors import WireError

MAGIC, VERSION = b"shol", 1
HEADER = struct.Struct("<4sBBHQQQ")
_WRAP = 2**64


def seal(code: int, elements: int, count: int, *bodies: Tensor) -> Payload:
    """What travels: the bodies behind their header."""
    check = _checksum(code, elements, count, bodies)
    header = HEADER.pack(MAGIC, VERSION, code, 0, elements, count, check)
    return torch.frombuffer(bytearray(header), dtype=torch.uint8), *bodies


def unseal(payload: Payload, code: int, elements: int) -> tuple[int, Payload]:
    """The count and the bodies; raises WireError unless this codec wrote them for so many elements."""
    if not payload or payload[0].dtype != torch.uint8 or payload[0].numel() != HEADER.size:
        got = [(p.dtype, p.numel()) for p in payload]
        raise WireError(
            f"a payload of {got} arrived, which does not begin with a header of {HEADER.size} bytes"
        )
    magic, version, wrote, zero, length, count, check = HEADER.unpack(bytes(payload[0].tolist()))
    bodies = payload[1:]
    if magic != MAGIC or zero != 0:
        raise WireError(f"a payload begins with {magic!r}, not with {MAGIC!r}: no codec of ours wrote it")
    if version != VERSION:
        raise WireError(f"a payload has version {version} of the wire format; this side has {VERSION}")
    if wrote != code:
        raise WireError(f"a payload of codec number {wrote} arrived where number {code} was expected")
    if length != elements:
        raise WireError(f"a payload of {length} elements arrived where {elements} were expected")
    if check != _checksum(code, length, count, bodies):
        raise WireError("the checksum of a payload is wrong: it was damaged on the way")
    return count, bodies


def _checksum(code: int, elements: int, count: int, bodies: Payload) -> int:
    """Words are added up as memory is read; so a damaged one shows, and a moved one of another body."""
    total = code + 3 * elements + 5 * count
    for number, body in enumerate(bodies, 1):
        raw = body.contiguous().view(torch.uint8)
        whole = raw.numel() // 8 * 8
        words = raw[:whole]
        if words.storage_offset() % 8:
            words = words.clone()
        total += (2 * number + 1) * (int(words.view(torch.int64).sum()) + raw.numel())
        total += int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return total % _WRAP
