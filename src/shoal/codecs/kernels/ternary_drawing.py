"""The draws of trits, and their codes: sixteen words of sixteen codes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs import trits
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.draws import draw
from shoal.core.codec import State

GROUP, LANES = 256, 16
ZERO, ONE = np.float32(0), np.float32(1)
HALF = np.float32(0.5)  # a code in the upper two bits of a word is a float: 2, 0, -0 or -2
NONE, TWO, CODE = np.int32(0), np.int32(2), np.int32(-(2**30))


def noise(state: State, block: int, blocks: int) -> tuple[Any, Any]:
    """The same as `trits.noise`."""
    drawn = np.empty(block + blocks, np.float32)
    draw(int(state[SEED]), int(state[COUNTER]), drawn)
    bits = (drawn * 2**23).astype(np.int32)
    return bits[:block] | trits.ONE, bits[block:]


@compiled
def write(v: Any, rest: Any, size: Any, begin: int, block: int, table: Any, mask: Any, codes: Any) -> None:
    """Write the codes of the block that begins there, and leave in a rest what they lack."""
    each, less = lanes.splat(ONE / size if size > ZERO else ZERO), lanes.splat(-size * HALF)
    flips = lanes.splat_word(mask)
    code_bits = lanes.splat_word(CODE if size == size else NONE)  # none of a block that is not finite
    for group in range(begin, begin + block, GROUP):
        words = lanes.splat_word(NONE)
        for i in range(group, group + GROUP, 4 * LANES):  # twice two: words stay in their registers longer
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
    """Two, so that their loads come first; the next block is on its way meanwhile."""
    j = i + LANES
    lanes.prefetch(v, i + block)
    lanes.prefetch(v, j + block)
    if rest is not None:
        lanes.prefetch(rest, i + block)
        lanes.prefetch(rest, j + block)
    u = v if rest is None else rest
    first, second = lanes.load(u, i), lanes.load(u, j)
    one = _codes(first, each, lanes.differ(lanes.load_words(table, at), flips), code_bits)
    two = _codes(second, each, lanes.differ(lanes.load_words(table, at + LANES), flips), code_bits)
    if rest is not None:
        lanes.store(rest, i, lanes.mul_add(lanes.floats(one), less, first))
        lanes.store(rest, j, lanes.mul_add(lanes.floats(two), less, second))
    return lanes.fixed(_behind(lanes.fixed(_behind(words, one)), two))


@compiled
def _codes(u: Any, each: Any, draws: Any, code_bits: Any) -> Any:
    """In the upper two bits: the sign of a float, and whether it is 2 or more."""
    sums = lanes.mul_add(u, each, lanes.signed_as(lanes.floats(draws), u))
    return lanes.both(lanes.bits(sums), code_bits)


@compiled
def _behind(words: Any, codes: Any) -> Any:
    return lanes.either(codes, lanes.down(words, lanes.splat_word(TWO)))
