"""Trits in one pass over memory: a block is measured while it is read, and drawn for while it is near.

Where its scale is not quite that of the lines of torch, about one trit in a million is another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs import trits
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.draws import draw
from shoal.codecs.kernels.ternary_reading import decode
from shoal.codecs.kernels.ternary_scale import clipped, measured, scale
from shoal.core.codec import State

__all__ = ["able", "decode", "encode"]

GROUP, LANES = 256, 16
ZERO, ONE = np.float32(0), np.float32(1)
HALF = np.float32(0.5)  # a code in the upper two bits of a word is a float: 2, 0, -0 or -2
NONE, TWO, CODE = np.int32(0), np.int32(2), np.int32(-(2**30))


def able(block: int) -> bool:
    """Whether it knows blocks of that length."""
    return block % GROUP == 0


def encode(
    v: Tensor, rest: Tensor | None, clip: float, block: int, state: State, codes: Tensor, scales: Tensor
) -> None:
    """Write the codes and scales of `v`, or of `v + rest`; leave in `rest` what they lack."""
    n, whole, blocks = v.numel(), v.numel() // block * block, v.numel() // block
    (table, masks), all_scales = _noise(state, block, scales.numel()), scales.numpy()
    left: Any = None if rest is None else rest.numpy()
    clip = float(clip)  # for a whole number, numba would compile it once more
    _encode(v.detach().numpy(), left, clip, block, block, table, masks, codes.numpy(), all_scales[:blocks])
    if whole < n:  # a short block is filled up with zeros
        fill = (0, block - (n - whole))
        last, more = pad(v.detach()[whole:], fill), torch.empty(block // 16, dtype=torch.int32)
        left = None if rest is None else pad(rest[whole:], fill).numpy()
        _encode(last.numpy(), left, clip, block, n - whole, table, masks[-1:], more.numpy(), all_scales[-1:])
        codes[whole // 16 :] = more[: codes.numel() - whole // 16]
        if rest is not None:
            rest.numpy()[whole:] = left[: n - whole]


def _noise(state: State, block: int, blocks: int) -> tuple[Any, Any]:
    """The same as `trits.noise`."""
    drawn = np.empty(block + blocks, np.float32)
    draw(int(state[SEED]), int(state[COUNTER]), drawn)
    bits = (drawn * 2**23).astype(np.int32)
    return bits[:block] | trits.ONE, bits[block:]


@compiled
def _encode(
    v: Any, rest: Any, clip: float, block: int, length: int, table: Any, masks: Any, codes: Any, scales: Any
) -> None:
    share = clip * clip / length
    for b in range(scales.size):
        most, total = measured(v, rest, b * block, block)
        size = clipped(most, total, share)
        if size < ZERO:
            size = scale(v if rest is None else rest, total, share, b * block, block)
        scales[b] = size
        _draw(v, rest, size, b * block, block, table, masks[b], codes)


@compiled
def _draw(v: Any, rest: Any, size: Any, begin: int, block: int, table: Any, mask: Any, codes: Any) -> None:
    each = lanes.splat(ONE / size if size > ZERO else ZERO)  # nor if it is no number
    less, flips = lanes.splat(-size * HALF), lanes.splat_word(mask)
    for group in range(begin, begin + block, GROUP):
        words = lanes.splat_word(NONE)
        for i in range(group, group + GROUP, 4 * LANES):
            words = _two_rows(v, rest, i, i - begin, block, table, flips, each, less, words)
            j = i + 2 * LANES
            words = _two_rows(v, rest, j, j - begin, block, table, flips, each, less, words)
        lanes.store_words(codes, group // LANES, words)


@compiled
def _two_rows(
    v: Any, rest: Any, i: int, at: int, block: int, table: Any, flips: Any, each: Any, less: Any, words: Any
) -> Any:
    """Two, so that their loads come first; the next block is on its way meanwhile."""
    j = i + LANES
    lanes.prefetch(v, i + block)
    lanes.prefetch(v, j + block)
    if rest is not None:
        lanes.prefetch(rest, i + block)
        lanes.prefetch(rest, j + block)
    u = v if rest is None else rest
    first, second = lanes.load(u, i), lanes.load(u, j)
    one = _codes(first, each, lanes.differ(lanes.load_words(table, at), flips))
    two = _codes(second, each, lanes.differ(lanes.load_words(table, at + LANES), flips))
    if rest is not None:
        lanes.store(rest, i, lanes.mul_add(lanes.floats(one), less, first))
        lanes.store(rest, j, lanes.mul_add(lanes.floats(two), less, second))
    return lanes.fixed(_behind(lanes.fixed(_behind(words, one)), two))


@compiled
def _codes(u: Any, each: Any, draws: Any) -> Any:
    """In the upper two bits: the sign of a float, and whether it is 2 or more."""
    sums = lanes.mul_add(u, each, lanes.signed_as(lanes.floats(draws), u))
    return lanes.both(lanes.bits(sums), lanes.splat_word(CODE))


@compiled
def _behind(words: Any, codes: Any) -> Any:
    return lanes.either(codes, lanes.down(words, lanes.splat_word(TWO)))
