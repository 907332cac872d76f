"""Elias code: small signed integers, most of them zero, as a stream of bits (Elias 1975).

A chapter is 8192 numbers. The stream is one chapter after the other, each padded with zeros to words of 4
bytes. For every number that is not zero, a chapter has its distance from the previous one, a sign bit (1:
negative) and its magnitude; the last distance is that to just after the last number. Distances and magnitudes
are in Elias' gamma code: as many zeros as the number has binary digits after the first, a one, then those
digits. Below 128 it is never longer than his omega code, and few numbers here are larger.

If that is not shorter, a chapter has all its numbers in the bits that the largest needs: the sign in the
lowest bit, the magnitude in the others. The number of words tells which form it is. Bits fill a byte from its
lowest, and the lowest digit of a number comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.kernels.dispatch import on_cpu

CHAPTER, WORD = 8192, 32
LARGEST = 2**15 - 1  # the largest magnitude that a codec may ask for


def pack(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The stream of int16 numbers of magnitudes up to `most`, and the words of each chapter."""
    numbers = numbers.cpu()
    if on_cpu():
        from shoal.codecs.qsgd import elias_cpu

        return elias_cpu.pack(numbers, most, CHAPTER)
    chapters = [_write_chapter(part.long(), most) for part in torch.split(numbers, CHAPTER) if len(part)]
    lengths = torch.tensor([len(chapter) // 4 for chapter in chapters], dtype=torch.int32)
    return torch.cat([torch.empty(0, dtype=torch.uint8), *chapters]), lengths


def unpack(stream: Tensor, lengths: Tensor, n: int, most: int) -> Tensor:
    """The `n` numbers of a stream, in int16; raises WireError unless it holds exactly those."""
    stream, lengths = as_long_as_its_chapters(stream, lengths, n, most)
    numbers: Tensor | None
    if on_cpu():
        from shoal.codecs.qsgd import elias_cpu

        numbers = elias_cpu.unpack(stream, lengths, n, most, CHAPTER)
    else:
        numbers = _read_stream(stream, lengths, n, most)
    if numbers is None:
        raise invalid(most)
    return numbers


def as_long_as_its_chapters(stream: Tensor, lengths: Tensor, n: int, most: int) -> tuple[Tensor, Tensor]:
    """Both on the CPU; raises WireError unless their sizes fit `n` numbers."""
    stream, lengths = stream.cpu().flatten(), lengths.cpu().flatten()
    full, last = divmod(n, CHAPTER)
    longest = torch.tensor([words(CHAPTER, most)] * full + [words(last, most)] * (last > 0))
    fits = stream.dtype == torch.uint8 and lengths.dtype == torch.int32 and lengths.shape == longest.shape
    if not fits or (lengths < 1).any() or (lengths > longest).any() or 4 * lengths.sum() != stream.numel():
        raise WireError(f"a stream of {stream.numel()} bytes does not hold {n} numbers up to {most}")
    return stream, lengths


def invalid(most: int) -> WireError:
    """The error for a stream whose codes are wrong."""
    return WireError(f"a chapter of a stream does not hold the expected count of numbers up to {most}")


def _read_stream(stream: Tensor, lengths: Tensor, n: int, most: int) -> Tensor | None:
    numbers = torch.zeros(n, dtype=torch.int16)
    chapters = torch.split(stream, [4 * k for k in lengths.tolist()])
    for chapter, part in zip(chapters, torch.split(numbers, CHAPTER), strict=False):
        found = _read_chapter(chapter.tolist(), len(part), most)
        if found is None:
            return None
        part.copy_(torch.tensor(found))
    return numbers


def words(numbers: int, most: int) -> int:
    """The words of a chapter of so many numbers, each in the bits that `most` needs."""
    return -(-numbers * (1 + most.bit_length()) // WORD)


def _write_chapter(numbers: Tensor, most: int) -> Tensor:
    """The bytes of a chapter of int64 numbers."""
    places = numbers.nonzero().flatten()
    ends = torch.cat([places, places.new_tensor([len(numbers)])])
    distance, n = _gamma(torch.diff(ends, prepend=ends.new_tensor([-1])))
    magnitude, m = _gamma(torch.cat([numbers[places].abs(), ends.new_tensor([1])]))
    sign = torch.cat([(numbers[places] < 0).long(), ends.new_tensor([0])])
    codes, bits = distance | sign << n | magnitude << (n + 1), n + 1 + m
    bits[-1] = n[-1]  # no number follows the last distance
    if -(-int(bits.sum()) // WORD) >= words(len(numbers), most):
        codes = numbers.abs() << 1 | (numbers < 0)
        bits = torch.full_like(codes, 1 + most.bit_length())
    return _bytes(codes, bits)


def _read_chapter(chapter: list[int], size: int, most: int) -> list[int] | None:
    """The numbers of a chapter; None if it is invalid."""
    text = "".join(f"{byte:08b}"[::-1] for byte in chapter)
    if len(text) == WORD * words(size, most):
        return _fixed(text, size, most)
    found, at, place = [0] * size, 0, -1
    while True:
        distance, at = _number(text, at)
        place += distance
        if not distance or place > size:
            return None
        if place == size:
            break
        negative = text[at : at + 1] == "1"
        magnitude, at = _number(text, at + 1)
        if not 1 <= magnitude <= most:
            return None
        found[place] = -magnitude if negative else magnitude
    return found if len(text) - at < WORD and "1" not in text[at:] else None


def _fixed(text: str, size: int, most: int) -> list[int] | None:
    width = 1 + most.bit_length()
    codes = [int(text[at : at + width][::-1], 2) for at in range(0, size * width, width)]
    if "1" in text[size * width :] or any(code == 1 or code >> 1 > most for code in codes):
        return None  # 1 would be -0
    return [-(code >> 1) if code & 1 else code >> 1 for code in codes]


def _number(text: str, at: int) -> tuple[int, int]:
    """The number whose code begins at `at`, and where it ends; 0 if there is none."""
    one = text.find("1", at)
    end = 2 * one - at + 1
    if one < 0 or end > len(text):
        return 0, at
    return int("1" + text[one + 1 : end][::-1], 2), end


def _gamma(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The gamma codes, and how many bits each has."""
    digits = torch.frexp(numbers.double()).exponent.long() - 1  # after the first
    return (((numbers - (1 << digits)) << 1) + 1) << digits, 2 * digits + 1


def _bytes(codes: Tensor, bits: Tensor) -> Tensor:
    begins = bits.cumsum(0) - bits
    found = torch.zeros(-(-int(bits.sum()) // WORD) * WORD, dtype=torch.uint8)
    for j in range(int(bits.max())):
        longer = bits > j
        found[begins[longer] + j] = (codes[longer] >> j & 1).byte()
    return (found.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
