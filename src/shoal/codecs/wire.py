"""The wire format: a header before the bodies that a codec writes, so that nothing else is taken for them.

    offset  bytes
    0       4      "shol"
    4       1      version, 1
    5       1      code of the codec
    6       2      0
    8       8      elements of the vector
    16      8      count: a number the codec needs to decode, such as how many elements are sent
    24      8      checksum: the weighted sum, modulo 2^64, of all 8-byte words of the bodies and of code,
                   elements, count and body lengths

All little-endian. Each body is a flat tensor, whose dtype and length the codec derives from these numbers and
checks before it decodes. The header is on the device of the bodies. A header on a GPU is computed there, and
the CPU waits for it once, when a payload is decoded.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.core.codec import Payload
from shoal.core.errors import WireError

MAGIC, VERSION = b"shol", 1
HEADER = struct.Struct("<4sBBHQQQ")
_WRAP = 2**64


def seal(code: int, elements: int, count: int, *bodies: Tensor) -> Payload:
    """The payload: the header, then the bodies."""
    device = bodies[-1].device if bodies else None
    header = torch.tensor(numbers(code, elements, count, *bodies)).to(device, non_blocking=True)
    for held in _held(bodies):
        header[3:].add_(held.to(header.device, non_blocking=header.is_cuda))  # a CPU has to wait for it
    return header.view(torch.uint8), *bodies


def unseal(payload: Payload, code: int, elements: int) -> tuple[int, Payload]:
    """The count and the bodies; raises WireError unless this codec wrote them for that many elements."""
    if not _has_header(payload):
        got = [(p.dtype, p.numel()) for p in payload]
        raise WireError(f"a payload of {got} does not begin with a header of {HEADER.size} bytes")
    header, bodies = eights(payload[0]), payload[1:]
    told = torch.cat([header, *(held.view(1).to(header.device) for held in _held(bodies))]).tolist()
    magic, version, wrote, zero, length, count, check = HEADER.unpack(struct.pack("<4q", *told[:4]))
    if magic != MAGIC or zero != 0:
        raise WireError(f"a payload begins with {magic!r}, not with {MAGIC!r}: no codec of Shoal wrote it")
    if version != VERSION:
        raise WireError(f"a payload has version {version} of the wire format; this side has {VERSION}")
    if wrote != code:
        raise WireError(f"a payload of codec number {wrote} arrived where number {code} was expected")
    if length != elements:
        raise WireError(f"a payload of {length} elements arrived where {elements} were expected")
    if check != (numbers(code, length, count, *bodies)[3] + sum(told[4:])) % _WRAP:
        raise WireError("the checksum of a payload is wrong: it was damaged on the way")
    return count, bodies


def numbers(code: int, elements: int, count: int, *bodies: Tensor) -> tuple[int, int, int, int]:
    """The header as four signed words; the sums of the bodies are still to be added to the last."""
    first = int.from_bytes(MAGIC + bytes((VERSION, code, 0, 0)), "little")
    about = sum((2 * number + 1) * body.nbytes for number, body in enumerate(bodies, 1))
    check = code + 3 * elements + 5 * count + about
    return first, _signed(elements), _signed(count), _signed(check)


def beside(out: Tensor, payload: Payload, *parts: tuple[torch.dtype, int]) -> bool:
    """Whether a payload is a header and these bodies on the device of `out`, as GPU kernels need it."""
    got = [(part.dtype, part.numel()) for part in payload[1:]]
    near = all(part.device == out.device and part.is_contiguous() for part in payload)
    return near and _has_header(payload) and got == list(parts)


def eights(raw: Tensor) -> Tensor:
    """Bytes as eight-byte words."""
    return (raw.clone() if raw.storage_offset() % 8 else raw.contiguous()).view(torch.int64)


def _has_header(payload: Payload) -> bool:
    return bool(payload) and payload[0].dtype == torch.uint8 and payload[0].numel() == HEADER.size


def _signed(word: int) -> int:
    return (word + _WRAP // 2) % _WRAP - _WRAP // 2


def _held(bodies: Payload) -> list[Tensor]:
    """Weighted sums of the words of each body: they differ if a word is damaged, or moves to another body."""
    sums = []
    for number, body in enumerate(bodies, 1):
        raw = body.contiguous().view(torch.uint8)
        whole = raw.numel() // 8 * 8
        sums.append((2 * number + 1) * eights(raw[:whole]).sum())
        if whole < raw.numel():
            sums.append(eights(pad(raw[whole:], (0, 8 - (raw.numel() - whole)))).sum())
    return sums
