"""One chapter of a stream of numbers, written in torch and read bit by bit; `shoal.codecs.elias` says how."""

from __future__ import annotations

import torch
from torch import Tensor

CHAPTER, WORD = 8192, 32


def words(numbers: int, most: int) -> int:
    """How many words so many numbers make in the bits that `most` needs."""
    return -(-numbers * (1 + most.bit_length()) // WORD)


def writing(numbers: Tensor, most: int) -> Tensor:
    """The bytes of a chapter of int64 numbers."""
    places = numbers.nonzero().flatten()
    ends = torch.cat([places, places.new_tensor([len(numbers)])])
    distance, n = _gamma(torch.diff(ends, prepend=ends.new_tensor([-1])))
    magnitude, m = _gamma(torch.cat([numbers[places].abs(), ends.new_tensor([1])]))
    sign = torch.cat([(numbers[places] < 0).long(), ends.new_tensor([0])])
    codes, bits = distance | sign << n | magnitude << (n + 1), n + 1 + m
    bits[-1] = n[-1]  # there is nothing behind the last distance
    if -(-int(bits.sum()) // WORD) >= words(len(numbers), most):
        codes = numbers.abs() << 1 | (numbers < 0)
        bits = torch.full_like(codes, 1 + most.bit_length())
    return _bytes(codes, bits)


def reading(chapter: list[int], size: int, most: int) -> list[int] | None:
    """The numbers of a chapter; None where it holds anything else."""
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
        return None  # 1 would be zero with a sign
    return [-(code >> 1) if code & 1 else code >> 1 for code in codes]


def _number(text: str, at: int) -> tuple[int, int]:
    """The number whose code begins there, and where it ends; 0 if there is none."""
    one = text.find("1", at)
    end = 2 * one - at + 1
    if one < 0 or end > len(text):
        return 0, at
    return int("1" + text[one + 1 : end][::-1], 2), end


def _gamma(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and how many bits each has."""
    digits = torch.frexp(numbers.double()).exponent.long() - 1  # after the first
    return (((numbers - (1 << digits)) << 1) + 1) << digits, 2 * digits + 1


def _bytes(codes: Tensor, bits: Tensor) -> Tensor:
    begins = bits.cumsum(0) - bits
    found = torch.zeros(-(-int(bits.sum()) // WORD) * WORD, dtype=torch.uint8)
    for j in range(int(bits.max())):
        longer = bits > j
        found[begins[longer] + j] = (codes[longer] >> j & 1).byte()
    return (found.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
