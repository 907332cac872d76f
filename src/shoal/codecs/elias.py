"""Small whole numbers with signs, most of them zero, as a stream of bits (Elias 1975).

A chapter is 8192 numbers; the stream is its chapters one after the other, each filled up with zeros to words
of 4 bytes. For every number that is not zero, a chapter has its distance from the one before, a bit for the
sign (1: negative) and its magnitude; at the end comes the distance to just behind the last number. Distances
and magnitudes are in Elias' gamma code: as many zeros as the number has binary digits after the first, a one,
then those digits. Below 128 it is never longer than his omega code, and few numbers here are larger.

A chapter that would not be shorter so has its numbers one after the other in the bits that the largest needs:
the sign in the lowest bit, the magnitude in the others. The number of words tells which it is. Bits fill a
byte from its lowest, and the lowest digit of a number comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.chapters import CHAPTER, reading, words, writing
from shoal.codecs.kernels import on_cpu
from shoal.core.errors import WireError

LARGEST = 2**15 - 1  # the largest magnitude that there may be


def pack(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The stream for int16 numbers of magnitudes up to `most`, and the words of each chapter."""
    numbers = numbers.cpu()
    if on_cpu():
        from shoal.codecs.kernels import elias as kernel

        return kernel.pack(numbers, most)
    chapters = [writing(chapter.long(), most) for chapter in torch.split(numbers, CHAPTER) if len(chapter)]
    lengths = torch.tensor([len(chapter) // 4 for chapter in chapters], dtype=torch.int32)
    return torch.cat([torch.empty(0, dtype=torch.uint8), *chapters]), lengths


def unpack(stream: Tensor, lengths: Tensor, n: int, most: int) -> Tensor:
    """The `n` numbers in a stream, in int16; raises WireError unless it holds just those."""
    stream, lengths = stream.cpu().flatten(), lengths.cpu().flatten()
    full, last = divmod(n, CHAPTER)
    longest = torch.tensor([words(CHAPTER, most)] * full + [words(last, most)] * (last > 0))
    fits = stream.dtype == torch.uint8 and lengths.dtype == torch.int32 and lengths.shape == longest.shape
    if not fits or (lengths < 1).any() or (lengths > longest).any() or 4 * lengths.sum() != stream.numel():
        raise WireError(f"a stream of {stream.numel()} bytes does not hold {n} numbers up to {most}")
    numbers: Tensor | None
    if on_cpu():
        from shoal.codecs.kernels import elias_reading as kernel

        numbers = kernel.unpack(stream, lengths, n, most)
    else:
        numbers = _unpack(stream, lengths, n, most)
    if numbers is None:
        raise WireError(f"a chapter of a stream does not hold numbers up to {most}, or not just as many")
    return numbers


def _unpack(stream: Tensor, lengths: Tensor, n: int, most: int) -> Tensor | None:
    numbers = torch.zeros(n, dtype=torch.int16)
    chapters = torch.split(stream, [4 * k for k in lengths.tolist()])
    for chapter, part in zip(chapters, torch.split(numbers, CHAPTER), strict=False):
        found = reading(chapter.tolist(), len(part), most)
        if found is None:
            return None
        part.copy_(torch.tensor(found))
    return numbers
