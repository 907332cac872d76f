"""A register of bits: whole words leave it while a stream is written, and come in while one is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs.kernels.compiler import compiled

ZERO, ONE, WORD, LOW = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)
WORDS, BELOW = np.uint64(5), np.uint64(31)  # of a number of bits: shifted, and those that make no word
FIRST = np.uint64(2**15 - 1)  # the one of a code is among these bits in every number that there may be


@compiled
def put(code: Any, bits: Any, held: Any, filled: Any, words: Any, at: int) -> Any:
    """Add at most 32 bits to fewer than 32. What there is gets written, and is held until it makes a word."""
    held |= code << filled
    filled += bits
    words[at] = np.uint32(held & LOW)
    full = filled >> WORDS
    return held >> (full << WORDS), filled & BELOW, at + np.int64(full)


@compiled
def fill(words: Any, held: Any, filled: Any, at: int) -> Any:
    """At least 32 bits held, which no code with its sign exceeds."""
    if filled > WORD:
        return held, filled, at
    word = np.uint64(words[at]) if at < words.size else ZERO
    return held | (word << filled), filled + WORD, at + 1


@compiled
def gamma(held: Any) -> Any:
    """The number whose code comes next, and the bits of that; 0 if there is none."""
    first = held & FIRST
    if first == ZERO:
        return 0, ZERO
    one = first & (~first + ONE)
    digits = np.uint64((np.float32(one).view(np.int32) >> 23) - 127)
    behind = (held >> (digits + ONE)) & (one - ONE)
    return np.int64(one | behind), digits + digits + ONE


@compiled
def ends(words: Any, held: Any, filled: Any, at: int) -> Any:
    """Whether no whole word is left, all of what is left is zero, and no bit was read that is not there."""
    left = np.int64(filled) + 32 * (words.size - at)
    return 0 <= left < 32 and held == ZERO
