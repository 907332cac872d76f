"""Packing: integers of 1, 2, 4, 8 or 16 bits in words of 32, so that kernels handle sixteen at a time.

Sixteen words lie side by side. With one bit each they hold 512 numbers: bit k of word j is number 16 k + j.
With two bits each they hold 256: bits 2 k and 2 k + 1 of word j are number 16 k + j. So a row of sixteen
numbers is shifted by the same amount. The last sixteen words are padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROW = 16
APART = {8: 0x00FF00FF, 4: 0x0F0F0F0F, 2: 0x33333333}  # masks of fields of so many bits, as many bits apart


def words(elements: int, bits: int) -> int:
    """The number of words that so many numbers take."""
    return -(-elements * bits // (ROW * 32)) * ROW


def packed(numbers: Tensor, bits: int) -> Tensor:
    """The words, in int32, of integers of so many bits."""
    full = words(numbers.numel(), bits) * 32 // bits
    rows = pad(numbers.long(), (0, full - numbers.numel())).view(-1, 32 // bits, ROW)
    return (rows << _places(bits, numbers.device)).sum(1).flatten().to(torch.int32)


def unpacked(packed: Tensor, bits: int, elements: int) -> Tensor:
    """The numbers in these words, in int64."""
    return numbers(packed, bits, elements).long()


def numbers(packed: Tensor, bits: int, elements: int) -> Tensor:
    """The numbers in these words, in int32: half the memory of `unpacked`."""
    rows = packed.reshape(-1, 1, ROW) >> _places(bits, packed.device).int()
    found: Tensor = (rows & (2**bits - 1)).flatten()
    return found[:elements]


def widened(packed: Tensor, bits: int) -> Tensor:
    """The same numbers in fields twice as wide; unused rows of words may follow."""
    rows = packed.view(-1, ROW)
    halves, by = torch.stack((rows & 0xFFFF, (rows >> 16) & 0xFFFF), 1), 8
    while by >= bits:
        halves = (halves | halves << by) & APART[by]
        by //= 2
    return halves.flatten()


def _places(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, bits, device=device)[:, None]
