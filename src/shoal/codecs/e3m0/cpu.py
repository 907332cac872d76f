"""e3m0 on a CPU, in one pass: exponents are read from the bits of the floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.blocks_cpu import add_largest, largest
from shoal.kernels.dispatch import compiled

BELOW_SIGN = np.int32(0x7FFFFFFF)
DIGITS, SIGN = np.int32(23), np.int32(28)  # where a float's exponent begins; from its sign to that of a code
MOST, EIGHT, ZERO, ONE = np.int32(7), np.int32(8), np.int32(0), np.int32(1)
BELOW = np.int32(127 - 7)  # the exponent of 1/128, one below that of code 1
LEAST = np.float32(2.0**-7)  # half of code 1: from here on, that is nearer than 0
EDGE = 0.75 - 2.0**-25  # halfway from the float below 0.75, the border of codes 6 and 7; others are halves
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
    for b in range(scales.size):
        part, pair = rest[b * block : (b + 1) * block], pairs[b * block // 2 : (b + 1) * block // 2]
        scale = add_largest(v[b * block : (b + 1) * block], part)
        scales[b] = scale
        _write(part, scale, pair)
        for i in range(part.size // 2):
            part[2 * i] -= _value(pair[i] & LOW, scale)
            part[2 * i + 1] -= _value(pair[i] >> NIBBLE, scale)
        if part.size % 2:
            part[part.size - 1] -= _value(pair[part.size // 2], scale)


@compiled
def _decode(pairs: Any, scales: Any, block: int, out: Any) -> None:
    for b in range(scales.size):
        part, pair = out[b * block : (b + 1) * block], pairs[b * block // 2 : (b + 1) * block // 2]
        scale = scales[b]
        for i in range(part.size // 2):
            part[2 * i] = _value(pair[i] & LOW, scale)
            part[2 * i + 1] = _value(pair[i] >> NIBBLE, scale)
        if part.size % 2:
            part[part.size - 1] = _value(pair[part.size // 2] & LOW, scale)


@compiled
def _write(part: Any, scale: Any, pairs: Any) -> None:
    if not scale > 0:
        pairs[:] = 0
        return
    edge = np.int32(_edge(scale) - (MOST << DIGITS))
    least = np.float32(scale * LEAST).view(np.int32)
    bits = part.view(np.int32)
    for i in range(part.size // 2):
        pairs[i] = np.uint8(
            _code(bits[2 * i], edge, least) | (_code(bits[2 * i + 1], edge, least) << np.int32(NIBBLE))
        )
    if part.size % 2:
        pairs[part.size // 2] = np.uint8(_code(bits[part.size - 1], edge, least))


@compiled
def _edge(scale: Any) -> Any:
    """The bits of the least float that, divided by the scale and rounded, is at least 0.75."""
    exact = np.float64(scale) * EDGE
    edge = np.float32(exact)
    bits = np.float32(edge).view(np.int32)
    return bits + ONE if np.float64(edge) < exact else bits


@compiled
def _code(bits: Any, edge: Any, least: Any) -> Any:
    """The sign, and the exponent of the nearest value, from the bits of a float.

    Borders between codes are halves of each other, so the difference of the bits counts them: no division.
    """
    size = bits & BELOW_SIGN
    above = ONE if size >= least else ZERO
    return np.int32(max((size - edge) >> DIGITS, above) | ((bits >> SIGN) & EIGHT))


@compiled
def _value(code: Any, scale: Any) -> Any:
    """What a code stands for: its float is put together from sign and exponent."""
    exponent = np.int32(code) & MOST
    power = np.int32((exponent + BELOW) << DIGITS if exponent else ZERO)
    return np.int32(power | ((np.int32(code) & EIGHT) << SIGN)).view(np.float32) * scale
