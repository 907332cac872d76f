"""The stream of gaps, bit by bit in one pass; what `shoal.codecs.gaps` says of it holds here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.kernels.compiler import compiled

BYTE, EIGHT = np.uint64(255), np.uint64(8)


def pack(positions: Tensor, k: int, signs: Tensor | None) -> Tensor:
    """The stream for these positions."""
    signed = signs is not None
    marks = np.zeros(0, np.uint8) if signs is None else signs.byte().numpy()
    return torch.from_numpy(_pack(positions.contiguous().numpy(), marks, k, signed))


def unpack(stream: Tensor, count: int, elements: int, k: int, signed: bool) -> tuple[Tensor, Tensor] | None:
    """The positions and signs in a stream that is long enough for the low bits; None where it is wrong."""
    positions, marks = np.empty(count, np.int64), np.empty(count if signed else 0, np.bool_)
    if not _unpack(stream.contiguous().numpy(), elements, k, signed, positions, marks):
        return None
    return torch.from_numpy(positions), torch.from_numpy(marks)


@compiled
def _pack(positions: Any, signs: Any, k: int, signed: bool) -> Any:
    zeros, last = 0, -1
    for i in range(positions.size):
        zeros += (positions[i] - last - 1) >> k
        last = positions[i]
    width = k + signed
    first = (positions.size * width + 7) // 8
    stream = np.zeros(first + (positions.size + zeros + 7) // 8, np.uint8)
    held, filled, at = np.uint64(0), 0, 0  # bits that do not make a byte yet
    bit, last = 8 * first, -1
    for i in range(positions.size):
        gap = positions[i] - last - 1
        last = positions[i]
        low = gap & ((1 << k) - 1)
        if signed:
            low |= np.int64(signs[i]) << k
        held |= np.uint64(low) << np.uint64(filled)
        filled += width
        while filled >= 8:
            stream[at] = held & BYTE
            held >>= EIGHT
            filled -= 8
            at += 1
        bit += gap >> k
        stream[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit += 1
    if filled:
        stream[at] = held & BYTE
    return stream


@compiled
def _unpack(stream: Any, elements: int, k: int, signed: bool, positions: Any, signs: Any) -> Any:
    width = k + signed
    first = (positions.size * width + 7) // 8
    held, filled, at = np.uint64(0), 0, 0
    count, position = 0, np.int64(-1)
    for byte in range(first, stream.size):
        ones = np.int64(stream[byte])
        for j in range(8):
            if not ones >> j & 1:
                position += np.int64(1) << k
                continue
            if count == positions.size:
                return False  # so the low bits, of which there are as many, are not read past their end
            while filled < width:
                held |= np.uint64(stream[at]) << np.uint64(filled)
                filled += 8
                at += 1
            position += 1 + np.int64(held & np.uint64((1 << k) - 1))
            if position >= elements:
                return False
            positions[count] = position
            if signed:
                signs[count] = held >> np.uint64(k) & np.uint64(1)
            held >>= np.uint64(width)
            filled -= width
            count += 1
    return count == positions.size
