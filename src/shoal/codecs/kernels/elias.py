"""Streams of numbers, written through a register; `shoal.codecs.elias` says what they look like."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs import chapters
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.register import LOW, ONE, WORD, ZERO, put

CHAPTER = chapters.CHAPTER
SPARE = 2  # words behind the room of a chapter, for what is written before it is known to be too much


def pack(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The stream for the numbers, and the words of each chapter."""
    n = numbers.numel()
    longest = n // CHAPTER * chapters.words(CHAPTER, most) + chapters.words(n % CHAPTER, most)
    stream = torch.empty(4 * (longest + SPARE), dtype=torch.uint8)
    lengths = torch.empty(-(-n // CHAPTER), dtype=torch.int32)
    gamma, words = _gamma(max(CHAPTER + 1, most)), stream.numpy().view(np.uint32)
    used = _pack(numbers.contiguous().numpy(), 1 + most.bit_length(), gamma, words, lengths.numpy())
    return stream[: 4 * used], lengths


@cache
def _gamma(most: int) -> Any:
    """For each number its code and, above 32 bits, how many bits that has."""
    found = np.zeros(most + 1, np.uint64)
    for number in range(1, most + 1):
        digits = number.bit_length() - 1
        code = (((number - (1 << digits)) << 1) + 1) << digits
        found[number] = code | (2 * digits + 1) << 32
    return found


@compiled
def _pack(numbers: Any, width: int, gamma: Any, stream: Any, lengths: Any) -> int:
    at, places = 0, np.empty(CHAPTER + 1, np.int32)
    for c in range(lengths.size):
        part = numbers[c * CHAPTER : (c + 1) * CHAPTER]
        room = (part.size * width + 31) // 32
        words = stream[at : at + room + SPARE]
        lengths[c] = min(_write(part, gamma, places, words), room)
        if lengths[c] == room:
            _write_fixed(part, np.uint64(width), words)
        at += lengths[c]
    return at


@compiled
def _write(numbers: Any, gamma: Any, places: Any, words: Any) -> Any:
    """How many words it takes; it may stop once they are too many."""
    count = 0
    for i in range(numbers.size):  # so that there is no branch below that cannot be foreseen
        places[count] = i
        count += numbers[i] != 0
    held, filled, at, last = ZERO, ZERO, 0, np.int64(-1)
    for j in range(count):
        if at + SPARE >= words.size:
            return at
        place, number = np.int64(places[j]), np.int64(numbers[places[j]])
        distance, magnitude = gamma[place - last], gamma[abs(number)]
        last = place
        held, filled, at = put(distance & LOW, distance >> WORD, held, filled, words, at)
        code = ((magnitude & LOW) << ONE) | (ONE if number < 0 else ZERO)
        held, filled, at = put(code, (magnitude >> WORD) + ONE, held, filled, words, at)
    if at + SPARE >= words.size:
        return at
    distance = gamma[numbers.size - last]
    held, filled, at = put(distance & LOW, distance >> WORD, held, filled, words, at)
    words[at] = np.uint32(held)
    return at + (filled > ZERO)


@compiled
def _write_fixed(numbers: Any, width: Any, words: Any) -> None:
    held, filled, at = ZERO, ZERO, 0
    for i in range(numbers.size):
        number = np.int64(numbers[i])
        code = np.uint64((abs(number) << 1) | (number < 0))
        held, filled, at = put(code, width, held, filled, words, at)
    words[at] = np.uint32(held)
