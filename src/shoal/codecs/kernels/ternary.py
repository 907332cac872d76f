"""Trits in one pass: a block is measured while it is read, and drawn for while it is near the processor.

Squares are added up in float32, in sixteen lanes; the lines of torch do so in float64. So a scale may differ
by a few units in its last place, and then, about once in a million, a trit. Where sums are exact, as of small
whole numbers, nothing differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from shoal.codecs import trits
from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.ternary_reading import decode, strange

__all__ = ["decode", "encode", "strange"]

GROUP, LANES = 256, 16
ZERO, STEPS, SMALLEST = np.float32(0), np.float32(trits.STEPS), np.float32(trits.SMALLEST)
NONE, TWO, BELOW_SIGN, CODE = np.int32(0), np.int32(2), np.int32(0x7FFFFFFF), np.int32(-(2**30))
UNIT = np.float32(2.0**-30)  # of a trit in the upper two bits of a word
TINY, HUGE = np.float32(2.0**-40), np.float32(2.0**50)  # squares of what is in between fit a float32

Noise = tuple[Tensor, Tensor]


def encode(
    v: Tensor, rest: Tensor | None, clip: float, block: int, noise: Noise, codes: Tensor, scales: Tensor
) -> int:
    """Write the codes and scales of all whole blocks of `v`, or of `v + rest`; how many elements these are.

    Leaves in `rest` what they lack.
    """
    whole = v.numel() // block * block
    left = None if rest is None else rest.numpy()
    drawn = noise[0].numpy(), noise[1].numpy()
    _encode(v.detach().numpy(), left, clip, block, whole, drawn, codes.numpy(), scales.numpy())
    return whole


@compiled
def _encode(
    v: Any, rest: Any, clip: float, block: int, whole: int, noise: Any, codes: Any, scales: Any
) -> None:
    for b in range(whole // block):
        scales[b] = _scale(v, rest, clip, b * block, block)
        _draw(v, rest, scales[b], b * block, block, noise[0], noise[1][b], codes)


@compiled
def _scale(v: Any, rest: Any, clip: float, begin: int, block: int) -> Any:
    squares, top, below_sign = lanes.splat(ZERO), lanes.splat_word(NONE), lanes.splat_word(BELOW_SIGN)
    for i in range(begin, begin + block, LANES):
        u = lanes.load(v, i)
        if rest is not None:
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
    limit = np.float32(clip * np.sqrt(total / block))
    return min(most, limit) if clip > 0 else most


@compiled
def _squares(u: Any, begin: int, block: int) -> float:
    total = 0.0
    for i in range(begin, begin + block):
        total += np.float64(u[i]) ** 2
    return total


@compiled
def _draw(v: Any, rest: Any, scale: Any, begin: int, block: int, table: Any, mask: Any, codes: Any) -> None:
    steps, less, flips = lanes.splat(STEPS / scale), lanes.splat(-scale * UNIT), lanes.splat_word(mask)
    code, two, words = lanes.splat_word(CODE), lanes.splat_word(TWO), lanes.splat_word(NONE)
    for group in range(begin, begin + block, GROUP):
        for i in range(group, group + GROUP, LANES):
            lanes.prefetch(v, i + block)
            if rest is None:
                u = lanes.load(v, i)
            else:
                lanes.prefetch(rest, i + block)
                u = lanes.load(rest, i)
            draws = lanes.differ(lanes.load_words(table, i - begin), flips)
            trits = lanes.both(lanes.middle(lanes.to_words(lanes.mul(u, steps)), draws), code)
            if rest is not None:
                lanes.store(rest, i, lanes.mul_add(lanes.to_floats(trits), less, u))
            words = lanes.either(trits, lanes.down(words, two))
        lanes.store_words(codes, group // LANES, words)
