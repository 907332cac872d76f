"""Trits on a CPU, in one pass: a block is measured while it is read, and encoded while it is in cache.

Squares are summed in float32, in thirty-two lanes; the PyTorch code sums them in float64. So a scale may be a
few units in the last place off, unless sums are exact, as of small whole numbers; then about one trit in a
million differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs import lanes
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.draws_cpu import draw
from shoal.codecs.ternary import trits
from shoal.core.codec import State
from shoal.kernels.dispatch import compiled

GROUP, LANES, ROWS = 256, 16, 16  # a group of 256 trits is sixteen words, row by row
FIRST = 256  # elements in which a block that is clipped mostly shows it
AHEAD = 256  # elements; how far ahead to prefetch into the L1 cache
ZERO, ONE, UNKNOWN = np.float32(0), np.float32(1), np.float32(-1)
HALF = np.float32(0.5)  # in the upper two bits of a word, a trit is the float 2, 0, -0 or -2
SMALLEST = np.float32(trits.SMALLEST)
TINY, HUGE = np.float32(2.0**-40), np.float32(2.0**50)  # the squares of all in between fit a float32
NONE, TWO, BELOW_SIGN = np.int32(0), np.int32(2), np.int32(0x7FFFFFFF)
LAST, CODE = 30, np.int32(-(2**30))  # the upper two bits: where they begin, and their mask


def able(block: int) -> bool:
    """Whether the kernels take blocks of that length."""
    return block % GROUP == 0


def encode(
    v: Tensor, rest: Tensor | None, clip: float, block: int, state: State, codes: Tensor, scales: Tensor
) -> None:
    """Write the codes and scales of `v`, or of `v + rest`; `rest` becomes the compression error."""
    n, whole, blocks = v.numel(), v.numel() // block * block, v.numel() // block
    (table, masks), all_scales = _noise(state, block, scales.numel()), scales.numpy()
    left: Any = None if rest is None else rest.numpy()
    clip = float(clip)  # an int would make Numba compile the kernel again
    _encode(v.detach().numpy(), left, clip, block, block, table, masks, codes.numpy(), all_scales[:blocks])
    if whole < n:  # a short block is padded with zeros
        fill = (0, block - (n - whole))
        last, more = pad(v.detach()[whole:], fill), torch.empty(block // 16, dtype=torch.int32)
        left = None if rest is None else pad(rest[whole:], fill).numpy()
        _encode(last.numpy(), left, clip, block, n - whole, table, masks[-1:], more.numpy(), all_scales[-1:])
        codes[whole // 16 :] = more[: codes.numel() - whole // 16]
        if rest is not None:
            rest.numpy()[whole:] = left[: n - whole]


def scales(u: Tensor, clip: float, block: int, length: int) -> Tensor:
    """The scales of the blocks of `u`: `length` elements, then padding with zeros."""
    found = torch.empty(u.numel() // block)
    _scales(u.numpy(), float(clip), block, length, found.numpy())
    return found


def codes(u: Tensor, scales: Tensor, block: int, state: State) -> Tensor:
    """The codes of whole blocks, on these scales."""
    drawn = torch.empty(u.numel() // 16, dtype=torch.int32)
    _codes(u.numpy(), scales.numpy(), block, *_noise(state, block, scales.numel()), drawn.numpy())
    return drawn


def decode(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Decode into `out`."""
    n, whole, blocks = out.numel(), out.numel() // block * block, out.numel() // block
    _decode(codes.numpy(), scales.numpy()[:blocks], block, out.numpy())
    if whole < n:
        last, more = torch.empty(block), pad(codes[whole // 16 :], (0, block // 16))
        _decode(more.numpy(), scales.numpy()[-1:], block, last.numpy())
        out[whole:] = last[: n - whole]


def _noise(state: State, block: int, blocks: int) -> tuple[Any, Any]:
    """As `trits.noise`."""
    drawn = np.empty(block + blocks, np.float32)
    draw(int(state[SEED]), int(state[COUNTER]), drawn)
    bits = (drawn * 2**23).astype(np.int32)
    return bits[:block] | trits.ONE, bits[block:]


@compiled
def _scales(u: Any, clip: float, block: int, length: int, scales: Any) -> None:
    for b in range(scales.size):
        share = clip * clip / min(block, length - b * block)
        scales[b] = _scale(u, None, share, b * block, block)


@compiled
def _codes(u: Any, scales: Any, block: int, table: Any, masks: Any, codes: Any) -> None:
    for b in range(scales.size):
        _write(u, None, scales[b], b * block, block, table, masks[b], codes)


@compiled
def _scale(v: Any, rest: Any, share: float, begin: int, block: int) -> Any:
    most, total = _measured(v, rest, begin, block)
    size = _clipped(most, total, share)
    return _full_scale(v if rest is None else rest, total, share, begin, block) if size < ZERO else size


@compiled
def _encode(
    v: Any, rest: Any, clip: float, block: int, length: int, table: Any, masks: Any, codes: Any, scales: Any
) -> None:
    share = clip * clip / length
    for b in range(scales.size):
        size = _scale(v, rest, share, b * block, block)
        scales[b] = size
        _write(v, rest, size, b * block, block, table, masks[b], codes)


@compiled
def _decode(codes: Any, scales: Any, block: int, out: Any) -> None:
    code = lanes.splat_word(CODE)
    for b in range(scales.size):
        half = lanes.splat(scales[b] * HALF)
        for group in range(b * block, (b + 1) * block, GROUP):
            words = lanes.load_words(codes, group // LANES)
            for row in range(ROWS):  # upwards: downwards, cache lines are read before they are written
                upper = lanes.up(words, lanes.splat_word(np.int32(LAST - 2 * row)))
                lanes.store(out, group + row * LANES, lanes.mul(lanes.floats(lanes.both(upper, code)), half))


# ------------------------------------------------------------------------------------- the scale of a block


@compiled
def _measured(v: Any, rest: Any, begin: int, block: int) -> Any:
    """The largest magnitude among the first elements of a block, and the sum of all squares.

    With a residual, the elements are added to it first.
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
def _clipped(most: Any, total: float, share: float) -> Any:
    """The scale, if one of the first elements is beyond the clip and all squares fit a float32; else -1.

    `share` is the square of the clip, divided by the number of elements.
    """
    limit = np.float32(np.sqrt(total * share))
    is_known = share > 0 and most > TINY and most >= limit and total < HUGE**2
    return limit if is_known else UNKNOWN


@compiled
def _full_scale(u: Any, total: float, share: float, begin: int, block: int) -> Any:
    """The scale of any block; reads all of it once more."""
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
    """The largest magnitude; NaN is larger than any other."""
    return np.int32(lanes.largest(top)).view(np.float32)


@compiled
def _squares(u: Any, begin: int, block: int) -> float:
    total = 0.0
    for i in range(begin, begin + block):
        total += np.float64(u[i]) ** 2
    return total


# ------------------------------------------------------------------------------------- the trits of a block


@compiled
def _write(v: Any, rest: Any, size: Any, begin: int, block: int, table: Any, mask: Any, codes: Any) -> None:
    """Write the codes of the block at `begin`; a residual becomes the compression error."""
    each, less = lanes.splat(ONE / size if size > ZERO else ZERO), lanes.splat(-size * HALF)
    flips = lanes.splat_word(mask)
    code_bits = lanes.splat_word(CODE if size == size else NONE)  # 0 in a block that is not finite
    for group in range(begin, begin + block, GROUP):
        words = lanes.splat_word(NONE)
        for i in range(group, group + GROUP, 4 * LANES):  # two times two rows: `words` stay in registers
            words = _two_rows(v, rest, i, i - begin, block, table, flips, code_bits, each, less, words)
            j = i + 2 * LANES
            words = _two_rows(v, rest, j, j - begin, block, table, flips, code_bits, each, less, words)
        lanes.store_words(codes, group // LANES, words)


@compiled
def _two_rows(
    v: Any,
    rest: Any,
    i: int,
    at: int,
    block: int,
    table: Any,
    flips: Any,
    code_bits: Any,
    each: Any,
    less: Any,
    words: Any,
) -> Any:
    """Two rows, so that the CPU loads both first; prefetches the next block."""
    j = i + LANES
    lanes.prefetch(v, i + block)
    lanes.prefetch(v, j + block)
    if rest is not None:
        lanes.prefetch(rest, i + block)
        lanes.prefetch(rest, j + block)
    u = v if rest is None else rest
    first, second = lanes.load(u, i), lanes.load(u, j)
    one = _trits(first, each, lanes.differ(lanes.load_words(table, at), flips), code_bits)
    two = _trits(second, each, lanes.differ(lanes.load_words(table, at + LANES), flips), code_bits)
    if rest is not None:
        lanes.store(rest, i, lanes.mul_add(lanes.floats(one), less, first))
        lanes.store(rest, j, lanes.mul_add(lanes.floats(two), less, second))
    return lanes.fixed(_behind(lanes.fixed(_behind(words, one)), two))


@compiled
def _trits(u: Any, each: Any, draws: Any, code_bits: Any) -> Any:
    """In the upper two bits of a float: its sign, and whether its magnitude is 2 or more."""
    sums = lanes.mul_add(u, each, lanes.signed_as(lanes.floats(draws), u))
    return lanes.both(lanes.bits(sums), code_bits)


@compiled
def _behind(words: Any, codes: Any) -> Any:
    return lanes.either(codes, lanes.down(words, lanes.splat_word(TWO)))
