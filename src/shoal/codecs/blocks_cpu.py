"""The scale of a block, for CPU kernels: what `blocks.py` computes.

Without the sign bit, floats are in the order of their bits, and integers are compared faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs.blocks import SMALLEST as _SMALLEST
from shoal.kernels.dispatch import compiled

SMALLEST = np.float32(_SMALLEST)
BELOW_SIGN = np.int32(0x7FFFFFFF)
INFINITE = np.float32(np.inf)


@compiled
def largest(block: Any) -> Any:
    """The largest magnitude: 0 if below SMALLEST, NaN if any element is not finite."""
    bits = block.view(np.int32)
    top = np.int32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & BELOW_SIGN)
    return usable(np.int32(top).view(np.float32))


@compiled
def add_largest(block: Any, rest: Any) -> Any:
    """Add a block to `rest`, and return the largest magnitude of the sum."""
    top = np.int32(0)
    for i in range(rest.size):
        total = np.float32(block[i] + rest[i])
        rest[i] = total
        top = max(top, np.float32(total).view(np.int32) & BELOW_SIGN)
    return usable(np.int32(top).view(np.float32))


@compiled
def usable(top: Any) -> Any:
    """A scale or norm: 0 if below SMALLEST, NaN if not finite."""
    if not top < INFINITE:
        return np.float32(np.nan)
    return top if top >= SMALLEST else np.float32(0)
