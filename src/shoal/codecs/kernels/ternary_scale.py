"""The scale of a block of trits, mostly in one pass over it.

Squares are added up in float32, in thirty-two lanes; the lines of torch do so in float64. So a scale may be a
few units in the last place from theirs, unless sums are exact, as of small whole numbers.

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
ZERO, UNKNOWN, SMALLEST = np.float32(0), np.float32(-1), np.float32(trits.SMALLEST)
NONE, BELOW_SIGN = np.int32(0), np.int32(0x7FFFFFFF)
TINY, HUGE = np.float32(2.0**-40), np.float32(2.0**50)  # squares of what is in between fit a float32


@compiled
def measured(v: Any, rest: Any, begin: int, block: int) -> Any:
    """The largest magnitude of the first elements of a block, and the sum of all squares.

    With a rest, the elements are added to that before.
    """
    squares, more, top = lanes.splat(ZERO), lanes.splat(ZERO), lanes.splat_word(NONE)
    for i in range(begin, begin + FIRST, LANES):
        u = _taken(v, rest, i)
        top, squares = _larger(top, u), lanes.mul_add(u, u, squares)
    for i in range(begin + FIRST, begin + block, 2 * LANES):
        u = _taken(v, rest, i)
        squares = lanes.mul_add(u, u, squares)
        u = _taken(v, rest, i + LANES)
        more = lanes.mul_add(u, u, more)
    return _largest(top), float(lanes.total(lanes.add(squares, more)))


@compiled
def clipped(most: Any, total: float, share: float) -> Any:
    """The scale, if one of the first is beyond the clip and all squares fit a float32; else -1.

    `share` is the square of the clip over the number of elements.
    """
    limit = np.float32(np.sqrt(total * share))
    is_known = share > 0 and most > TINY and most >= limit and total < HUGE**2
    return limit if is_known else UNKNOWN


@compiled
def scale(u: Any, total: float, share: float, begin: int, block: int) -> Any:
    """The same whatever they are: all are looked at."""
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
    return min(most, np.float32(np.sqrt(total * share))) if share > 0 else most


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
