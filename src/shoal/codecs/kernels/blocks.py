"""How large blocks are, for kernels: as `shoal.codecs.blocks` has it.

Without their signs, the bits of floats are in the order of the floats, and whole numbers are compared faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs.blocks import SMALLEST as _SMALLEST
from shoal.codecs.kernels.compiler import compiled

SMALLEST = np.float32(_SMALLEST)
BELOW_SIGN = np.int32(0x7FFFFFFF)
INFINITE = np.float32(np.inf)


@compiled
def largest(block: Any) -> Any:
    """0 where that is less than SMALLEST, not a number where anything is not finite."""
    bits = block.view(np.int32)
    top = np.int32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & BELOW_SIGN)
    return _usable(np.int32(top).view(np.float32))


@compiled
def add_largest(block: Any, rest: Any) -> Any:
    """Add a block to `rest`; the same of the sum."""
    top = np.int32(0)
    for i in range(rest.size):
        total = np.float32(block[i] + rest[i])
        rest[i] = total
        top = max(top, np.float32(total).view(np.int32) & BELOW_SIGN)
    return _usable(np.int32(top).view(np.float32))


@compiled
def measure(v: Any, bucket: int, by_largest: bool, norms: Any) -> None:
    """Fill in the norm of each bucket."""
    width = 1
    while width < bucket:
        width *= 2
    squares = np.zeros(width, np.float64)
    for b in range(norms.size):
        part = v[b * bucket : (b + 1) * bucket]
        norms[b] = largest(part) if by_largest else _euclidean(part, squares)


@compiled
def _euclidean(part: Any, squares: Any) -> Any:
    for i in range(part.size):
        squares[i] = np.float64(part[i]) * np.float64(part[i])
    squares[part.size :] = 0
    half = squares.size // 2
    while half:
        for i in range(half):
            squares[i] += squares[half + i]
        half //= 2
    return _usable(np.float32(np.sqrt(squares[0])))


@compiled
def _usable(top: Any) -> Any:
    if not top < INFINITE:
        return np.float32(np.nan)
    return top if top >= SMALLEST else np.float32(0)
