"""QSGD on a CPU: norms, levels and the Elias code of `elias.py` in one pass, a chapter after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.blocks_cpu import largest, usable
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.draws_cpu import draw
from shoal.codecs.qsgd.elias_cpu import (
    aligned,
    gamma_codes,
    known_codes,
    pack_chapter,
    room_for,
    unpack_chapter,
)
from shoal.core.codec import State
from shoal.kernels.dispatch import compiled

# ------------------------------------------------------------------------------- a chapter after the other


def encode(
    v: Tensor, levels: int, bucket: int, norm: str, state: State, chapter: int, rest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream of `v`, or of `v + rest`, words of each chapter, and norms; `rest` becomes the error."""
    u = v.detach() if rest is None else rest.add_(v)
    norms = torch.empty(count(v.numel(), bucket))
    stream, lengths = room_for(v.numel(), levels, chapter)
    about = u.numpy(), bucket, norm == "max", np.float32(levels), rest is not None
    begin = int(state[SEED]), int(state[COUNTER])
    codes = chapter, 1 + levels.bit_length(), gamma_codes(max(chapter + 1, levels))
    used = _encode(*about, *begin, *codes, norms.numpy(), stream.numpy().view(np.uint32), lengths.numpy())
    return stream[: 4 * used], lengths, norms


def decode(
    stream: Tensor, lengths: Tensor, norms: Tensor, levels: int, bucket: int, chapter: int, out: Tensor
) -> bool:
    """Decode a stream that is as long as its chapters into `out`; return whether it is valid."""
    words, width = aligned(stream), 1 + levels.bit_length()
    given = words, lengths.contiguous().numpy(), norms.flatten().numpy(), bucket, np.float32(levels)
    return bool(_decode(*given, chapter, width, levels, known_codes(levels), out.numpy()))


@compiled
def _encode(
    u: Any,
    bucket: int,
    by_largest: bool,
    levels: Any,
    lacks: bool,
    seed: int,
    counter: int,
    chapter: int,
    width: int,
    gamma: Any,
    norms: Any,
    stream: Any,
    lengths: Any,
) -> int:
    squares, places = np.empty(_power_of_two(bucket), np.float64), np.empty(chapter + 1, np.int32)
    draws, numbers = np.empty(chapter, np.float32), np.empty(chapter, np.int16)
    at, measured = 0, 0
    for c in range(lengths.size):
        begin, end = c * chapter, min((c + 1) * chapter, u.size)
        while measured * bucket < end:
            part = u[measured * bucket : (measured + 1) * bucket]
            norms[measured] = largest(part) if by_largest else _euclidean(part, squares)
            measured += 1
        number = numbers[: end - begin]
        draw(seed, counter + begin // 2, draws[: end - begin])
        _round(u[begin:end], begin, norms, bucket, levels, draws, lacks, number)
        lengths[c] = pack_chapter(number, width, gamma, places, stream[at:])
        at += lengths[c]
    return at


@compiled
def _decode(
    stream: Any,
    lengths: Any,
    norms: Any,
    bucket: int,
    levels: Any,
    chapter: int,
    width: int,
    most: int,
    known: Any,
    out: Any,
) -> bool:
    at, numbers = 0, np.empty(chapter, np.int16)
    for c in range(lengths.size):
        part = out[c * chapter : (c + 1) * chapter]
        number = numbers[: part.size]
        if not unpack_chapter(stream[at : at + lengths[c]], width, most, known, number):
            return False
        _scale(number, c * chapter, norms, bucket, levels, part)
        at += lengths[c]
    return True


# --------------------------------------------------------------------------------------------------- levels


@compiled
def _power_of_two(bucket: int) -> int:
    width = 1
    while width < bucket:
        width *= 2
    return width


@compiled
def _euclidean(part: Any, squares: Any) -> Any:
    """As `blocks.euclidean`; slices, because LLVM vectorises loops whose indices have no offset."""
    for i in range(part.size):
        squares[i] = np.float64(part[i]) * np.float64(part[i])
    squares[part.size :] = 0
    half = squares.size // 2
    while half:
        first, second = squares[:half], squares[half : 2 * half]
        for i in range(half):
            first[i] += second[i]
        half //= 2
    return usable(np.float32(np.sqrt(squares[0])))


@compiled
def _round(
    v: Any, first: int, norms: Any, bucket: int, levels: Any, draws: Any, lacks: bool, numbers: Any
) -> None:
    """Round a chapter, whose elements are those from `first` on, to levels of the norms of its buckets."""
    begin = 0
    while begin < v.size:
        b = (first + begin) // bucket
        end = min((b + 1) * bucket - first, v.size)
        part, number = v[begin:end], numbers[begin:end]
        if norms[b] > 0:
            _levels(part, norms[b], levels, draws[begin:end], number)
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
def _scale(numbers: Any, first: int, norms: Any, bucket: int, levels: Any, out: Any) -> None:
    begin = 0
    while begin < out.size:
        b = (first + begin) // bucket
        end = min((b + 1) * bucket - first, out.size)
        part, number, norm = out[begin:end], numbers[begin:end], norms[b]
        for i in range(part.size):
            part[i] = np.float32(number[i]) / levels * norm
        begin = end
