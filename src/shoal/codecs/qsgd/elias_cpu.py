"""The Elias code of `elias.py` on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.kernels.dispatch import compiled

SPARE = 2  # words after the room of a chapter, for what is written before it is known to be too long
ZERO, ONE, WORD, LOW = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)
WORDS, BELOW = np.uint64(5), np.uint64(31)  # of a number of bits: the shift to words, and the bits left over
FIRST = np.uint64(2**15 - 1)  # the first one of every valid code is among these bits
NEXT = np.uint64(2**12 - 1)  # many hold two distances with their numbers
FARTHEST = 64  # more than two distances in 12 bits


# --------------------------------------------------------------------------------------------------- writing


def pack(numbers: Tensor, most: int, chapter: int) -> tuple[Tensor, Tensor]:
    """The stream of the numbers, and the words of each chapter."""
    stream, lengths = room_for(numbers.numel(), most, chapter)
    width, gamma = 1 + most.bit_length(), gamma_codes(max(chapter + 1, most))
    words = stream.numpy().view(np.uint32)
    used = _pack(numbers.contiguous().numpy(), chapter, width, gamma, words, lengths.numpy())
    return stream[: 4 * used], lengths


def room_for(n: int, most: int, chapter: int) -> tuple[Tensor, Tensor]:
    """Memory for the longest stream of so many numbers, and for the words of each chapter."""
    width = 1 + most.bit_length()
    longest = n // chapter * count(chapter * width, 32) + count(n % chapter * width, 32)
    stream = torch.empty(4 * (longest + SPARE), dtype=torch.uint8)
    return stream, torch.empty(count(n, chapter), dtype=torch.int32)


@cache
def gamma_codes(most: int) -> Any:
    """For each number its gamma code, and in the upper 32 bits the length of that."""
    found = np.zeros(most + 1, np.uint64)
    for number in range(1, most + 1):
        digits = number.bit_length() - 1
        code = (((number - (1 << digits)) << 1) + 1) << digits
        found[number] = code | (2 * digits + 1) << 32
    return found


@compiled
def _pack(numbers: Any, chapter: int, width: int, gamma: Any, stream: Any, lengths: Any) -> int:
    at, places = 0, np.empty(chapter + 1, np.int32)
    for c in range(lengths.size):
        part = numbers[c * chapter : (c + 1) * chapter]
        lengths[c] = pack_chapter(part, width, gamma, places, stream[at:])
        at += lengths[c]
    return at


@compiled
def pack_chapter(numbers: Any, width: int, gamma: Any, places: Any, stream: Any) -> Any:
    """Write a chapter to the beginning of the stream; return its words."""
    room = (numbers.size * width + 31) // 32
    words = stream[: room + SPARE]
    length = min(_write(numbers, gamma, places, words), room)
    if length == room:
        _write_fixed(numbers, np.uint64(width), words)
    return length


@compiled
def _write(numbers: Any, gamma: Any, places: Any, words: Any) -> Any:
    """Write a chapter in gamma code; return its words. Stops once there are too many."""
    found = 0
    for i in range(numbers.size):  # so that the next loop has no branch that the CPU mispredicts
        places[found] = i
        found += numbers[i] != 0
    held, filled, at, last = ZERO, ZERO, 0, np.int64(-1)
    for j in range(found):
        if at + SPARE >= words.size:
            return at
        place = np.int64(places[j])
        number = np.int64(numbers[np.uint64(place)])
        distance, magnitude = gamma[np.uint64(place - last)], gamma[np.uint64(abs(number))]
        last = place
        signed = ((magnitude & LOW) << ONE) | (ONE if number < 0 else ZERO)
        code = (distance & LOW) | (signed << (distance >> WORD))
        bits = (distance >> WORD) + ONE + (magnitude >> WORD)
        if bits > WORD:  # rare: most distances and levels are small
            held, filled, at = _put(code & LOW, WORD, held, filled, words, at)
            code, bits = code >> WORD, bits - WORD
        held, filled, at = _put(code, bits, held, filled, words, at)
    if at + SPARE >= words.size:
        return at
    distance = gamma[numbers.size - last]
    held, filled, at = _put(distance & LOW, distance >> WORD, held, filled, words, at)
    words[at] = np.uint32(held)
    return at + (filled > ZERO)


@compiled
def _write_fixed(numbers: Any, width: Any, words: Any) -> None:
    held, filled, at = ZERO, ZERO, 0
    for i in range(numbers.size):
        number = np.int64(numbers[i])
        code = np.uint64((abs(number) << 1) | (number < 0))
        held, filled, at = _put(code, width, held, filled, words, at)
    words[at] = np.uint32(held)


# --------------------------------------------------------------------------------------------------- reading


def unpack(stream: Tensor, lengths: Tensor, n: int, most: int, chapter: int) -> Tensor | None:
    """The numbers of a stream that is as long as its chapters; None if it is invalid.

    Nothing beyond the end of a chapter is read: zeros stand for it.
    """
    numbers, width = np.empty(n, np.int16), 1 + most.bit_length()
    given = aligned(stream), lengths.contiguous().numpy(), chapter, width, most
    return torch.from_numpy(numbers) if _unpack(*given, known_codes(most), numbers) else None


def aligned(stream: Tensor) -> Any:
    """The words of a stream, which may begin anywhere: a copy."""
    return np.frombuffer(stream.contiguous().numpy().tobytes(), np.uint32)


@cache
def known_codes(most: int) -> Any:
    """What the next 12 bits begin with, if magnitudes are up to `most`: two distances with numbers, or one.

    From the lowest bit: 4 bits of code length, 5 and 5 of distances, 6 and 6 of the second number and the
    first. If the 12 bits hold one alone, the second is the same at distance 0; if none, all is 0.
    """
    known = np.zeros(int(NEXT) + 1, np.int32)
    for bits in range(known.size):
        distance, number, used = _next_number(bits, 12, most)
        after, second, more = _next_number(bits >> used, 12 - used, most) if used else (0, 0, 0)
        if used:
            numbers = number << 20 | ((second if more else number) & 63) << 14
            known[bits] = numbers | after << 9 | distance << 4 | used + more
    return known


def _next_number(bits: int, room: int, most: int) -> tuple[int, int, int]:
    """A distance, a number, and the bits of both; zeros unless they fit the room."""
    distance, n = map(int, _gamma(np.uint64(bits)))
    magnitude, m = map(int, _gamma(np.uint64(bits >> n + 1)))
    if not distance or not 1 <= magnitude <= most or n + 1 + m > room:
        return 0, 0, 0
    return distance, -magnitude if bits >> n & 1 else magnitude, n + 1 + m


@compiled
def _unpack(stream: Any, lengths: Any, chapter: int, width: int, most: int, known: Any, numbers: Any) -> bool:
    at = 0
    for c in range(lengths.size):
        part = numbers[c * chapter : (c + 1) * chapter]
        if not unpack_chapter(stream[at : at + lengths[c]], width, most, known, part):
            return False
        at += lengths[c]
    return True


@compiled
def unpack_chapter(words: Any, width: int, most: int, known: Any, numbers: Any) -> Any:
    """Read a chapter; return whether it is valid."""
    if words.size == (numbers.size * width + 31) // 32:
        return _read_fixed(words, np.uint64(width), most, numbers)
    numbers[:] = 0
    return _read(words, most, known, numbers)


@compiled
def _read(words: Any, most: int, known: Any, numbers: Any) -> Any:
    held, filled, at, place = ZERO, ZERO, 0, np.int64(-1)
    while True:
        held, filled, at = _fill(words, held, filled, at)
        coming = known[held & NEXT]
        if coming and place + FARTHEST < numbers.size:
            place += (coming >> 4) & 31
            numbers[np.uint64(place)] = coming >> 20
            place += (coming >> 9) & 31
            numbers[np.uint64(place)] = np.int32(coming << 12) >> 26
            held >>= np.uint64(coming & 15)
            filled -= np.uint64(coming & 15)
            continue
        distance, bits = _gamma(held)
        if distance == 0 or place + distance >= numbers.size:
            break
        negative = (held >> bits) & ONE
        held, filled, at = _fill(words, held >> (bits + ONE), filled - bits - ONE, at)
        number, bits = _gamma(held)
        place += distance
        if number == 0 or number > most:
            return False
        numbers[place] = -number if negative else number
        held >>= bits
        filled -= bits
    return place + distance == numbers.size and _ends(words, held >> bits, filled - bits, at)


@compiled
def _read_fixed(words: Any, width: Any, most: int, numbers: Any) -> Any:
    held, filled, at = ZERO, ZERO, 0
    for i in range(numbers.size):
        held, filled, at = _fill(words, held, filled, at)
        code = np.int64(held & ((ONE << width) - ONE))
        magnitude = code >> 1
        if code == 1 or magnitude > most:
            return False
        numbers[i] = -magnitude if code & 1 else magnitude
        held >>= width
        filled -= width
    return _ends(words, held, filled, at)


# ----------------------------------------------------------------------- bits of a stream, a word at a time


@compiled
def _put(code: Any, bits: Any, held: Any, filled: Any, words: Any, at: int) -> Any:
    """Append at most 32 bits to fewer than 32 held ones; write the word, and move on if it is full."""
    held |= code << filled
    filled += bits
    words[at] = np.uint32(held & LOW)
    full = filled >> WORDS
    return held >> (full << WORDS), filled & BELOW, at + np.int64(full)


@compiled
def _fill(words: Any, held: Any, filled: Any, at: int) -> Any:
    """Read on until at least 32 bits are held, the most that a code with its sign takes."""
    if filled > WORD:
        return held, filled, at
    word = np.uint64(words[at]) if at < words.size else ZERO
    return held | (word << filled), filled + WORD, at + 1


@compiled
def _gamma(held: Any) -> Any:
    """The number whose gamma code comes next, and the length of the code; 0 if there is none."""
    first = held & FIRST
    if first == ZERO:
        return 0, ZERO
    one = first & (~first + ONE)
    digits = np.uint64((np.float32(one).view(np.int32) >> 23) - 127)
    behind = (held >> (digits + ONE)) & (one - ONE)
    return np.int64(one | behind), digits + digits + ONE


@compiled
def _ends(words: Any, held: Any, filled: Any, at: int) -> Any:
    """Whether the chapter ends here: less than a word is left, only zeros, and none was read past the end."""
    left = np.int64(filled) + 32 * (words.size - at)
    return 0 <= left < 32 and held == ZERO
