"""One bit in one pass: a column is added up while it is read, and lessened while it is near the processor.

Sums are of float32, in sixteen lanes; the lines of torch add up in float64. So the means may differ by a few
units in their last place, and the rest with them. Where sums are exact, as of small whole numbers, nothing
differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

GROUP, LANES = 512, 16
ZERO, ONE = np.float32(0), np.float32(1)
NONE, FIRST, SIGN = np.int32(0), np.int32(1), np.int32(-(2**31))


def encode(v: Tensor, rest: Tensor | None, column: int, signs: Tensor, values: Tensor) -> int:
    """Write the bits and means of all whole columns of `v`, or of `v + rest`; how many elements these are.

    Leaves in `rest` what they lack.
    """
    whole = v.numel() // column * column
    left = None if rest is None else rest.numpy()
    _encode(v.detach().numpy(), left, column, whole, signs.numpy(), values.numpy())
    return whole


def decode(signs: Tensor, values: Tensor, column: int, out: Tensor) -> int:
    """Write what they stand for into `out`, but for a last, short column; how many elements that is."""
    whole = out.numel() // column * column
    _decode(signs.numpy(), values.numpy(), column, whole, out.numpy())
    return whole


@compiled
def _encode(v: Any, rest: Any, column: int, whole: int, signs: Any, values: Any) -> None:
    for c in range(whole // column):
        begin = c * column
        low, high = _means(v, rest, begin, begin + column, signs)
        values[2 * c], values[2 * c + 1] = low, high
        if rest is not None:
            below, above = lanes.splat(low), lanes.splat(high)
            for i in range(begin, begin + column, LANES):
                u = lanes.load(rest, i)
                lanes.store(rest, i, lanes.sub(u, lanes.where_below(lanes.bits(u), below, above)))


@compiled
def _means(v: Any, rest: Any, begin: int, end: int, signs: Any) -> Any:
    zero, sign, one = lanes.splat(ZERO), lanes.splat_word(SIGN), lanes.splat_word(FIRST)
    low, high, few = zero, zero, 0
    for group in range(begin, end, GROUP):
        below = lanes.splat_word(NONE)
        for i in range(group, group + GROUP, LANES):
            u = lanes.load(v, i)
            if rest is not None:
                u = lanes.add(u, lanes.load(rest, i))
                lanes.store(rest, i, u)
            low, high = lanes.add(low, lanes.lesser(u, zero)), lanes.add(high, lanes.greater(u, zero))
            below = lanes.either(lanes.both(lanes.bits(u), sign), lanes.down(below, one))
        lanes.store_words(signs, group // 32, lanes.flip(below))
        few += lanes.sum_words(lanes.ones(below))
    many = np.float32(end - begin - few)
    return lanes.total(low) / max(np.float32(few), ONE), lanes.total(high) / max(many, ONE)


@compiled
def _decode(signs: Any, values: Any, column: int, whole: int, out: Any) -> None:
    for c in range(whole // column):
        low, high = lanes.splat(values[2 * c]), lanes.splat(values[2 * c + 1])
        for group in range(c * column, (c + 1) * column, GROUP):
            words = lanes.load_words(signs, group // 32)
            for row in range(32):
                mine = lanes.both(words, lanes.splat_word(np.int32(np.uint32(1) << np.uint32(row))))
                lanes.store(out, group + LANES * row, lanes.where_any(mine, high, low))
