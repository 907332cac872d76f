"""The scale of a block of trits, in one pass over it.

Squares are added up in float32, in sixteen lanes; the lines of torch do so in float64. So a scale may differ
from theirs by a few units in its last place. Where sums are exact, as of small whole numbers, it does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs import trits
from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

LANES = 16
AHEAD = 256  # elements; how far is near enough for the nearest memory
ZERO, SMALLEST = np.float32(0), np.float32(trits.SMALLEST)
NONE, BELOW_SIGN = np.int32(0), np.int32(0x7FFFFFFF)
TINY, HUGE = np.float32(2.0**-40), np.float32(2.0**50)  # squares of what is in between fit a float32


@compiled
def scale(v: Any, rest: Any, clip: float, begin: int, block: int, length: int) -> Any:
    """Of the `length` elements from `begin` on, and zeros; with a rest, add them to that before."""
    squares, top, below_sign = lanes.splat(ZERO), lanes.splat_word(NONE), lanes.splat_word(BELOW_SIGN)
    for i in range(begin, begin + block, LANES):
        lanes.prefetch(v, i + AHEAD)
        u = lanes.load(v, i)
        if rest is not None:
            lanes.prefetch(rest, i + AHEAD)
            u = lanes.add(u, lanes.load(rest, i))
            lanes.store(rest, i, u)
        top = lanes.larger(top, lanes.both(lanes.bits(u), below_sign))
        squares = lanes.mul_add(u, u, squares)
    most, total = np.int32(lanes.largest(top)).view(np.float32), float(lanes.total(squares))
    if not most < np.inf:
        return np.float32(np.nan)
    if most < SMALLEST:
        return ZERO
    if not TINY < most < HUGE:
        total = _squares(v if rest is None else rest, begin, block)
    limit = np.float32(clip * np.sqrt(total / length))
    return min(most, limit) if clip > 0 else most


@compiled
def _squares(u: Any, begin: int, block: int) -> float:
    total = 0.0
    for i in range(begin, begin + block):
        total += np.float64(u[i]) ** 2
    return total
