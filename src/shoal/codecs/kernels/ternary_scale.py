"""The scale of a block of trits, in one pass over it.

Squares are added up in float32, in thirty-two lanes; the lines of torch do so in float64. So a scale may
differ from theirs by a few units in its last place. Where sums are exact, as of small whole numbers, it does
not.

The largest matters only where nothing is beyond the clip. If something is, it mostly shows among the first;
only if not, all are looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs import trits
from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

LANES = 16
FIRST = 256  # elements
AHEAD = 256  # elements; how far is near enough for the nearest memory
ZERO, SMALLEST = np.float32(0), np.float32(trits.SMALLEST)
NONE, BELOW_SIGN = np.int32(0), np.int32(0x7FFFFFFF)
TINY, HUGE = np.float32(2.0**-40), np.float32(2.0**50)  # squares of what is in between fit a float32


@compiled
def scale(v: Any, rest: Any, clip: float, begin: int, block: int, length: int) -> Any:
    """Of the `length` elements from `begin` on, and zeros; with a rest, add them to that before."""
    squares, top = lanes.splat(ZERO), lanes.splat_word(NONE)
    for i in range(begin, begin + FIRST, LANES):
        u = _taken(v, rest, i)
        top, squares = _larger(top, u), lanes.mul_add(u, u, squares)
    more = lanes.splat(ZERO)
    for i in range(begin + FIRST, begin + block, 2 * LANES):
        one, two = _taken(v, rest, i), _taken(v, rest, i + LANES)
        squares, more = lanes.mul_add(one, one, squares), lanes.mul_add(two, two, more)
    total = float(lanes.total(lanes.add(squares, more)))
    most, limit = _largest(top), np.float32(clip * np.sqrt(total / length))
    if clip > 0 and TINY < most and most >= limit and total < HUGE**2:
        return limit
    return _of_all(v if rest is None else rest, clip, begin, block, length, total)


@compiled
def _of_all(u: Any, clip: float, begin: int, block: int, length: int, total: float) -> Any:
    """The same once they are added up, whatever they are."""
    top = lanes.splat_word(NONE)
    for i in range(begin, begin + block, LANES):
        top = _larger(top, lanes.load(u, i))
    most = _largest(top)
    if not most < np.inf:
        return np.float32(np.nan)
    if most < SMALLEST:
        return ZERO
    if not TINY < most < HUGE:
        total = _squares(u, begin, block)
    limit = np.float32(clip * np.sqrt(total / length))
    return min(most, limit) if clip > 0 else most


@compiled
def _taken(v: Any, rest: Any, i: int) -> Any:
    lanes.prefetch(v, i + AHEAD)
    u = lanes.load(v, i)
    if rest is not None:
        lanes.prefetch(rest, i + AHEAD)
        u = lanes.add(u, lanes.load(rest, i))
        lanes.store(rest, i, u)
    return u


@compiled
def _larger(top: Any, u: Any) -> Any:
    return lanes.larger(top, lanes.both(lanes.bits(u), lanes.splat_word(BELOW_SIGN)))


@compiled
def _largest(top: Any) -> Any:
    """The largest magnitude; what is not a number is larger than all."""
    return np.int32(lanes.largest(top)).view(np.float32)


@compiled
def _squares(u: Any, begin: int, block: int) -> float:
    total = 0.0
    for i in range(begin, begin + block):
        total += np.float64(u[i]) ** 2
    return total
