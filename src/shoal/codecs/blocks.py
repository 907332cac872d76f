"""Blocks: a vector as rows of so many consecutive elements, and how large each of them is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.core.limits import check_block as check_block

SMALLEST = 2.0**-119
"""A block with nothing larger travels as zeros: its scale would have fewer digits than a float32 has."""


def count(elements: int, block: int) -> int:
    """How many blocks so many elements make; the last may be shorter."""
    return -(-elements // block)


def rows(v: Tensor, block: int) -> Tensor:
    """The blocks in float32, one below the other; the last is filled up with zeros."""
    blocks = count(v.numel(), block)
    return pad(v.float(), (0, blocks * block - v.numel())).view(blocks, block)


def largest(blocks: Tensor) -> Tensor:
    """Of each block; 0 where that is less than SMALLEST, not a number where anything is not finite."""
    return _usable(blocks.abs().amax(1))


def euclidean(blocks: Tensor) -> Tensor:
    """The root of the sum of squares of each block, with the same exceptions.

    Halves are added to each other in double precision, so that the order is the same everywhere.
    """
    squares = pad(blocks.double() ** 2, (0, (1 << (blocks.shape[1] - 1).bit_length()) - blocks.shape[1]))
    while squares.shape[1] > 1:
        first, second = squares.chunk(2, 1)
        squares = first + second
    return _usable(squares[:, 0].sqrt().float())


def from_rows(blocks: Tensor, out: Tensor) -> Tensor:
    """Write the elements of the blocks into `out`."""
    return out.copy_(blocks.flatten()[: out.numel()])


def _usable(top: Tensor) -> Tensor:
    return top.where(top >= SMALLEST, 0).where(top.isfinite(), torch.nan)
