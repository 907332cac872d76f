"""QSGD on a CPU: norms in one pass over memory, rounding in another, then the Elias code of `elias.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.blocks_cpu import largest, usable
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.draws_cpu import draw
from shoal.codecs.kernels import compiled
from shoal.core.codec import State

PAGE = 4096  # elements that are rounded while their draws are in cache; even
SPARE = 2  # words after the room of a chapter, for what is written before it is known to be too long
ZERO, ONE, WORD, LOW = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)
WORDS, BELOW = np.uint64(5), np.uint64(31)  # of a number of bits: the shift to words, and the bits left over
FIRST = np.uint64(2**15 - 1)  # the first one of every valid code is among these bits
NEXT = np.uint64(2**12 - 1)  # most distances with their numbers have no more bits


# --------------------------------------------------------------------------------------------------- levels


def encode(
    v: Tensor, levels: int, bucket: int, norm: str, state: State, rest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers and norms of `v`, or of `v + rest`; `rest` becomes the compression error."""
    u = v.detach() if rest is None else rest.add_(v)
    numbers, norms = torch.empty(v.numel(), dtype=torch.int16), torch.empty(count(v.numel(), bucket))
    _measure(u.numpy(), bucket, norm == "max", norms.numpy())
    begin = int(state[SEED]), int(state[COUNTER])
    given = u.numpy(), norms.numpy(), bucket, np.float32(levels)
    _round(*given, *begin, rest is not None, numbers.numpy())
    return numbers, norms


def decode(numbers: Tensor, norms: Tensor, levels: int, bucket: int, out: Tensor) -> Tensor:
    """Decode into `out`."""
    _decode(numbers.numpy(), norms.flatten().numpy(), bucket, np.float32(levels), out.numpy())
    return out


@compiled
def _measure(v: Any, bucket: int, by_largest: bool, norms: Any) -> None:
    """Write the norm of each bucket."""
    width = 1
    while width < bucket:
        width *= 2
    squares = np.zeros(width, np.float64)
    for b in range(norms.size):
        part = v[b * bucket : (b + 1) * bucket]
        norms[b] = largest(part) if by_largest else _euclidean(part, squares)


@compiled
def _euclidean(part: Any, squares: Any) -> Any:
    for i in range(part.size):
        squares[i] = np.float64(part[i]) * np.float64(part[i])
    squares[part.size :] = 0
    half = squares.size // 2
    while half:
        for i in range(half):
            squares[i] += squares[half + i]
        half //= 2
    return usable(np.float32(np.sqrt(squares[0])))


@compiled
def _round(
    v: Any, norms: Any, bucket: int, levels: Any, seed: int, counter: int, lacks: bool, numbers: Any
) -> None:
    draws = np.empty(PAGE, np.float32)
    begin = 0
    while begin < v.size:
        if begin % PAGE == 0:
            draw(seed, counter + begin // 2, draws[: v.size - begin])
        b = begin // bucket
        end = min((b + 1) * bucket, (begin // PAGE + 1) * PAGE, v.size)
        at = begin % PAGE
        part, number = v[begin:end], numbers[begin:end]
        if norms[b] > 0:
            _levels(part, norms[b], levels, draws[at : at + end - begin], number)
        else:
            number[:] = 0
        if lacks:
            for i in range(part.size):
                part[i] -= np.float32(number[i]) / levels * norms[b]
        begin = end


@compiled
def _levels(part: Any, norm: Any, levels: Any, draws: Any, numbers: Any) -> None:
    for i in range(part.size):
        share = np.float32(abs(part[i]) / norm * levels)
        below = np.int32(share)
        level = np.int32(below + (draws[i] < share - np.float32(below)))
        numbers[i] = np.int16(-level if part[i] < 0 else level)


@compiled
def _decode(numbers: Any, norms: Any, bucket: int, levels: Any, out: Any) -> None:
    for b in range(norms.size):
        part, number = out[b * bucket : (b + 1) * bucket], numbers[b * bucket : (b + 1) * bucket]
        for i in range(part.size):
            part[i] = np.float32(number[i]) / levels * norms[b]


# -------------------------------------------------------------------------------------- Elias code: writing


def pack(numbers: Tensor, most: int, chapter: int) -> tuple[Tensor, Tensor]:
    """The stream of the numbers, and the words of each chapter."""
    n, width = numbers.numel(), 1 + most.bit_length()
    longest = n // chapter * count(chapter * width, 32) + count(n % chapter * width, 32)
    stream = torch.empty(4 * (longest + SPARE), dtype=torch.uint8)
    lengths = torch.empty(count(n, chapter), dtype=torch.int32)
    gamma, words = _gamma_codes(max(chapter + 1, most)), stream.numpy().view(np.uint32)
    used = _pack(numbers.contiguous().numpy(), chapter, width, gamma, words, lengths.numpy())
    return stream[: 4 * used], lengths


@cache
def _gamma_codes(most: int) -> Any:
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
        room = (part.size * width + 31) // 32
        words = stream[at : at + room + SPARE]
        lengths[c] = min(_write(part, gamma, places, words), room)
        if lengths[c] == room:
            _write_fixed(part, np.uint64(width), words)
        at += lengths[c]
    return at


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
        place, number = np.int64(places[j]), np.int64(numbers[places[j]])
        distance, magnitude = gamma[place - last], gamma[abs(number)]
        last = place
        held, filled, at = _put(distance & LOW, distance >> WORD, held, filled, words, at)
        code = ((magnitude & LOW) << ONE) | (ONE if number < 0 else ZERO)
        held, filled, at = _put(code, (magnitude >> WORD) + ONE, held, filled, words, at)
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


# -------------------------------------------------------------------------------------- Elias code: reading


def unpack(stream: Tensor, lengths: Tensor, n: int, most: int, chapter: int) -> Tensor | None:
    """The numbers of a stream that is as long as its chapters; None if it is invalid.

    Nothing beyond the end of a chapter is read: zeros stand for it.
    """
    numbers = np.zeros(n, np.int16)
    words = np.frombuffer(stream.contiguous().numpy().tobytes(), np.uint32)  # a copy, which is aligned
    width = 1 + most.bit_length()
    fits = _unpack(words, lengths.contiguous().numpy(), chapter, width, most, _known(), numbers)
    return torch.from_numpy(numbers) if fits else None


@cache
def _known() -> Any:
    """For the next 12 bits: the number, 8 bits of distance, 4 of code length; 0 if the code is longer."""
    known = np.zeros(int(NEXT) + 1, np.int32)
    for bits in range(known.size):
        distance, n = map(int, _gamma(np.uint64(bits)))
        magnitude, m = map(int, _gamma(np.uint64(bits >> n + 1)))
        if distance and magnitude and 1 << n + 1 + m <= known.size:
            known[bits] = (-magnitude if bits >> n & 1 else magnitude) << 12 | distance << 4 | n + 1 + m
    return known


@compiled
def _unpack(stream: Any, lengths: Any, chapter: int, width: int, most: int, known: Any, numbers: Any) -> bool:
    at = 0
    for c in range(lengths.size):
        part, words = numbers[c * chapter : (c + 1) * chapter], stream[at : at + lengths[c]]
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
        held, filled, at = _fill(words, held, filled, at)
        coming = known[np.int64(held & NEXT)]
        distance, number, bits = np.int64((coming >> 4) & 255), np.int64(coming >> 12), np.uint64(coming & 15)
        if coming == 0:
            distance, bits = _gamma(held)
            if distance == 0 or place + distance >= numbers.size:
                break
            negative = (held >> bits) & ONE
            held, filled, at = _fill(words, held >> (bits + ONE), filled - bits - ONE, at)
            number, bits = _gamma(held)
            number = -number if negative else number
        place += distance
        if place >= numbers.size or number == 0 or abs(number) > most:
            return False
        numbers[place] = number
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
