"""The bits of `bits.py` on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.kernels.dispatch import compiled

BYTE, EIGHT = np.uint64(255), np.uint64(8)


def to_bytes(numbers: Tensor, bits: int, length: int) -> Tensor:
    """As `bits.to_bytes`, which is so many bytes long."""
    packed = torch.empty(length, dtype=torch.uint8)
    _pack(numbers.flatten().numpy(), bits, packed.numpy())
    return packed


def from_bytes(packed: Tensor, bits: int, elements: int) -> Tensor:
    """As `bits.from_bytes`."""
    numbers = torch.empty(elements, dtype=torch.int64)
    _unpack(packed.contiguous().numpy(), bits, numbers.numpy())
    return numbers


@compiled
def _pack(numbers: Any, bits: int, packed: Any) -> None:
    held, filled, at, mask = np.uint64(0), 0, 0, np.uint64((1 << bits) - 1)
    for i in range(numbers.size):
        held |= (np.uint64(numbers[i]) & mask) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            packed[at] = held & BYTE
            held >>= EIGHT
            filled -= 8
            at += 1
    if filled:
        packed[at] = held & BYTE


@compiled
def _unpack(packed: Any, bits: int, numbers: Any) -> None:
    held, filled, at, mask = np.uint64(0), 0, 0, np.uint64((1 << bits) - 1)
    for i in range(numbers.size):
        while filled < bits:
            held |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        numbers[i] = np.int64(held & mask)
        held >>= np.uint64(bits)
        filled -= bits
