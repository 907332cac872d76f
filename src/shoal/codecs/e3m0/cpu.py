"""e3m0 on a CPU, in one pass: exponents are read from the bits of the floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.blocks_cpu import add_largest, largest
from shoal.codecs.kernels import compiled

POWERS = (0.0, *(2.0**power for power in range(-6, 1)))  # of the codes 0 to 7, in scales
VALUES = np.array([sign * value for sign in (1, -1) for value in POWERS], dtype=np.float32)
HALF = np.int32(1 << 22)  # of a float's mantissa: adding it carries into the exponent from 1.5 on
DIGITS, SIGN, ZERO, ONE, EIGHT = np.int32(23), np.int32(28), np.int32(0), np.int32(1), np.int32(8)
BELOW = np.int32(127 - 7)  # the exponent of 1/128, one below that of code 1
LEAST = np.float32(2.0**-7)  # half of code 1: from here on, that is nearer than 0
LOW, NIBBLE = np.uint8(15), np.uint8(4)


def encode(v: Tensor, block: int, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes, two a byte, and scales of `v`, or of `v + rest`; `rest` becomes the compression error."""
    pairs = torch.empty(count(v.numel(), 2), dtype=torch.uint8)
    scales = torch.empty(count(v.numel(), block))
    if rest is None:
        _encode(v.detach().numpy(), block, pairs.numpy(), scales.numpy())
    else:
        _encode_rest(v.detach().numpy(), rest.numpy(), block, pairs.numpy(), scales.numpy())
    return pairs, scales


def decode(pairs: Tensor, scales: Tensor, block: int, out: Tensor) -> Tensor:
    """Decode into `out`."""
    _decode(pairs.contiguous().numpy(), scales.numpy(), block, out.numpy())
    return out


@compiled
def _encode(v: Any, block: int, pairs: Any, scales: Any) -> None:
    for b in range(scales.size):
        part = v[b * block : (b + 1) * block]
        scales[b] = largest(part)
        _write(part, scales[b], pairs[b * block // 2 : (b + 1) * block // 2])


@compiled
def _encode_rest(v: Any, rest: Any, block: int, pairs: Any, scales: Any) -> None:
    values = np.empty_like(VALUES)
    for b in range(scales.size):
        part, pair = rest[b * block : (b + 1) * block], pairs[b * block // 2 : (b + 1) * block // 2]
        scales[b] = add_largest(v[b * block : (b + 1) * block], part)
        _write(part, scales[b], pair)
        for code in range(VALUES.size):
            values[code] = VALUES[code] * scales[b]
        for i in range(part.size // 2):
            part[2 * i] -= values[pair[i] & LOW]
            part[2 * i + 1] -= values[pair[i] >> NIBBLE]
        if part.size % 2:
            part[part.size - 1] -= values[pair[part.size // 2]]


@compiled
def _decode(pairs: Any, scales: Any, block: int, out: Any) -> None:
    values = np.empty_like(VALUES)
    for b in range(scales.size):
        part, pair = out[b * block : (b + 1) * block], pairs[b * block // 2 : (b + 1) * block // 2]
        for code in range(VALUES.size):
            values[code] = VALUES[code] * scales[b]
        for i in range(part.size // 2):
            part[2 * i] = values[pair[i] & LOW]
            part[2 * i + 1] = values[pair[i] >> NIBBLE]
        if part.size % 2:
            part[part.size - 1] = values[pair[part.size // 2] & LOW]


@compiled
def _write(part: Any, scale: Any, pairs: Any) -> None:
    if not scale > 0:
        pairs[:] = 0
        return
    for i in range(part.size // 2):
        pairs[i] = np.uint8(_code(part[2 * i], scale) | (_code(part[2 * i + 1], scale) << np.int32(NIBBLE)))
    if part.size % 2:
        pairs[part.size // 2] = np.uint8(_code(part[part.size - 1], scale))


@compiled
def _code(value: Any, scale: Any) -> Any:
    """The sign, and the exponent of the nearest value; all in 32 bits, which vectorises best.

    By a division: times 1 / scale, a value halfway between two would come out above or below.
    """
    size = np.float32(abs(value) / scale)
    exponent = np.int32(((np.float32(size).view(np.int32) + HALF) >> DIGITS) - BELOW)
    least = ONE if size >= LEAST else ZERO
    sign = np.int32(np.float32(value).view(np.int32) >> SIGN) & EIGHT
    return np.int32(max(exponent, least) | sign)
