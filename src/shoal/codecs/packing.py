"""Packing: numbers of 1, 2, 4, 8 or 16 bits in words of 32, so that sixteen at a time go in and out.

Sixteen words lie side by side. With one bit each they hold 512 numbers: bit k of word j is number 16 k + j;
with two bits each 256 of them, bits 2 k and 2 k + 1 of word j being number 16 k + j. So a processor writes a
row of sixteen with the same shift for all of them. The last sixteen words are filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROW = 16
APART = {8: 0x00FF00FF, 4: 0x0F0F0F0F, 2: 0x33333333}  # fields of so many bits, with as many between them


def words(elements: int, bits: int) -> int:
    """How many words so many numbers take."""
    return -(-elements * bits // (ROW * 32)) * ROW


def packed(numbers: Tensor, bits: int) -> Tensor:
    """The words, in int32, for integers of so many bits."""
    full = words(numbers.numel(), bits) * 32 // bits
    rows = pad(numbers.long(), (0, full - numbers.numel())).view(-1, 32 // bits, ROW)
    return (rows << _places(bits, numbers.device)).sum(1).flatten().to(torch.int32)


def unpacked(packed: Tensor, bits: int, elements: int) -> Tensor:
    """The numbers, in int64, that these words hold."""
    return numbers(packed, bits, elements).long()


def numbers(packed: Tensor, bits: int, elements: int) -> Tensor:
    """The same in int32: half the memory."""
    rows = packed.reshape(-1, 1, ROW) >> _places(bits, packed.device).int()
    found: Tensor = (rows & (2**bits - 1)).flatten()
    return found[:elements]


def widened(packed: Tensor, bits: int) -> Tensor:
    """The same numbers in fields twice as wide. Rows of words may follow that hold none."""
    rows = packed.view(-1, ROW)
    halves, by = torch.stack((rows & 0xFFFF, (rows >> 16) & 0xFFFF), 1), 8
    while by >= bits:
        halves = (halves | halves << by) & APART[by]
        by //= 2
    return halves.flatten()


def _places(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, bits, device=device)[:, None]
