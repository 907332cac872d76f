"""Gaps: rising positions as a stream of bits, in Golomb-Rice code (Golomb 1966, Rice 1979).

A gap is the number of elements between a position and the one before it. Its k lowest bits are written as
they are; the rest of it, q, as q zeros and a one. k follows from the number of positions and of elements.
First come the low bits of all gaps, each followed by a sign bit if signs are sent, padded to a whole byte;
then the zeros and ones of all gaps. Bits fill a byte from its lowest. That makes

    ceil(count (k + sign) / 8) + ceil((count + sum of q) / 8)  bytes.

Two parts, so that neither waits for the other while decoding. All arithmetic is in 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.kernels.dispatch import on_cpu


def low_bits(count: int, elements: int) -> int:
    """k: the integer nearest to log2(ln 2 / density), best if all elements are equally likely to be sent."""
    share = 4901 * elements // (10_000 * count) if count else 0  # ln 2 / sqrt 2, without rounding of floats
    return share.bit_length()


def pack(positions: Tensor, elements: int, signs: Tensor | None = None) -> Tensor:
    """The stream of rising positions below `elements`, with a sign (True or False) for each."""
    k = low_bits(positions.numel(), elements)
    if positions.device.type == "cpu" and on_cpu():
        from shoal.codecs.sparse import cpu

        return cpu.pack(positions, k, signs)
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    low = gaps & ((1 << k) - 1)
    if signs is not None:
        low |= signs.long() << k
    columns = [(low >> j & 1).byte() for j in range(k + (signs is not None))]
    fixed = torch.stack(columns, 1) if columns else low.byte()[:0]
    ones = torch.cumsum((gaps >> k) + 1, 0) - 1
    unary = torch.zeros(int(ones[-1]) + 1 if len(ones) else 0, dtype=torch.uint8, device=ones.device)
    unary[ones] = 1
    return torch.cat([_to_bytes(fixed.flatten()), _to_bytes(unary)])


def unpack(stream: Tensor, count: int, elements: int, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """The `count` positions, rising and below `elements`, and their signs (none if not `signed`).

    Raises WireError unless the stream holds exactly that.
    """
    k = low_bits(count, elements)
    first = -(-count * (k + signed) // 8)
    most = first - (-(count + (elements >> k)) // 8)
    if count > elements or stream.dtype != torch.uint8 or not first <= stream.numel() <= most:
        raise WireError(
            f"a stream of {stream.numel()} x {stream.dtype} arrived for {count} of {elements} positions, "
            f"which take from {first} to {most} bytes"
        )
    stream = stream.flatten()
    if stream.device.type == "cpu" and on_cpu():
        from shoal.codecs.sparse import cpu

        found = cpu.unpack(stream, count, elements, k, signed)
    else:
        found = _unpack(stream, count, elements, k, signed)
    if found is None or (stream.numel() > first and stream[-1] == 0):
        raise WireError(f"a stream does not hold exactly {count} rising positions below {elements}")
    return found


def _unpack(stream: Tensor, count: int, elements: int, k: int, signed: bool) -> tuple[Tensor, Tensor] | None:
    width = k + signed
    first = -(-count * width // 8)
    ones = _to_bits(stream[first:]).nonzero().flatten()
    if len(ones) != count:
        return None
    fixed = _to_bits(stream[:first])[: count * width].view(count, width)
    low = torch.zeros_like(ones)
    for j in range(k):
        low |= fixed[:, j].long() << j
    gaps = (torch.diff(ones, prepend=ones.new_tensor([-1])) - 1 << k) + low
    positions = torch.cumsum(gaps + 1, 0) - 1
    if count and positions[-1] >= elements:
        return None
    return positions, fixed[:, k].bool() if signed else torch.empty(0, dtype=torch.bool)


def _to_bytes(bits: Tensor) -> Tensor:
    whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _to_bits(stream: Tensor) -> Tensor:
    return (stream[:, None] >> torch.arange(8, dtype=torch.uint8, device=stream.device) & 1).flatten()
