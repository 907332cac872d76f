"""Streams of numbers, read through a register. Nothing behind the end of a chapter is read, zeros instead."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs import chapters
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.register import ONE, ZERO, ends, fill, gamma

CHAPTER = chapters.CHAPTER
NEXT = np.uint64(2**12 - 1)  # most distances with their numbers have no more bits


def unpack(stream: Tensor, lengths: Tensor, n: int, most: int) -> Tensor | None:
    """The numbers in a stream that is as long as its chapters; None where it holds anything else."""
    numbers = np.zeros(n, np.int16)
    words = np.frombuffer(stream.contiguous().numpy().tobytes(), np.uint32)  # bytes may begin anywhere
    width = 1 + most.bit_length()
    fits = _unpack(words, lengths.contiguous().numpy(), width, most, _known(), numbers)
    return torch.from_numpy(numbers) if fits else None


@cache
def _known() -> Any:
    """What the next bits mean: the number, 8 bits of distance, 4 that say how many they are; 0 if longer."""
    known = np.zeros(int(NEXT) + 1, np.int32)
    for bits in range(known.size):
        distance, n = map(int, gamma(np.uint64(bits)))
        magnitude, m = map(int, gamma(np.uint64(bits >> n + 1)))
        if distance and magnitude and 1 << n + 1 + m <= known.size:
            known[bits] = (-magnitude if bits >> n & 1 else magnitude) << 12 | distance << 4 | n + 1 + m
    return known


@compiled
def _unpack(stream: Any, lengths: Any, width: int, most: int, known: Any, numbers: Any) -> bool:
    at = 0
    for c in range(lengths.size):
        part, words = numbers[c * CHAPTER : (c + 1) * CHAPTER], stream[at : at + lengths[c]]
        if words.size == (part.size * width + 31) // 32:
            fits = _read_fixed(words, np.uint64(width), most, part)
        else:
            fits = _read(words, most, known, part)
        if not fits:
            return False
        at += lengths[c]
    return True


@compiled
def _read(words: Any, most: int, known: Any, numbers: Any) -> Any:
    held, filled, at, place = ZERO, ZERO, 0, np.int64(-1)
    while True:
        held, filled, at = fill(words, held, filled, at)
        coming = known[np.int64(held & NEXT)]
        distance, number, bits = np.int64((coming >> 4) & 255), np.int64(coming >> 12), np.uint64(coming & 15)
        if coming == 0:
            distance, bits = gamma(held)
            if distance == 0 or place + distance >= numbers.size:
                break
            negative = (held >> bits) & ONE
            held, filled, at = fill(words, held >> (bits + ONE), filled - bits - ONE, at)
            number, bits = gamma(held)
            number = -number if negative else number
        place += distance
        if place >= numbers.size or number == 0 or abs(number) > most:
            return False
        numbers[place] = number
        held >>= bits
        filled -= bits
    return place + distance == numbers.size and ends(words, held >> bits, filled - bits, at)


@compiled
def _read_fixed(words: Any, width: Any, most: int, numbers: Any) -> Any:
    held, filled, at = ZERO, ZERO, 0
    for i in range(numbers.size):
        held, filled, at = fill(words, held, filled, at)
        code = np.int64(held & ((ONE << width) - ONE))
        magnitude = code >> 1
        if code == 1 or magnitude > most:
            return False
        numbers[i] = -magnitude if code & 1 else magnitude
        held >>= width
        filled -= width
    return ends(words, held, filled, at)
