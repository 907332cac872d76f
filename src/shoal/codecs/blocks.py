"""Blocks: a vector as rows of consecutive elements, and the scale of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST = 2.0**-119
"""A block with nothing larger is sent as zeros: its scale would be a subnormal number, with fewer digits."""


def count(elements: int, block: int) -> int:
    """The number of blocks; the last may be shorter."""
    return -(-elements // block)


def rows(v: Tensor, block: int) -> Tensor:
    """The blocks in float32, one a row; the last is padded with zeros."""
    blocks = count(v.numel(), block)
    return pad(v.float(), (0, blocks * block - v.numel())).view(blocks, block)


def largest(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block: 0 if below SMALLEST, NaN if any element is not finite."""
    return _usable(blocks.abs().amax(1))


def euclidean(blocks: Tensor) -> Tensor:
    """The Euclidean norm of each block, with the same exceptions.

    One half of the squares is added to the other, in float64, until one is left: the same order everywhere.
    """
    squares = pad(blocks.double() ** 2, (0, (1 << (blocks.shape[1] - 1).bit_length()) - blocks.shape[1]))
    while squares.shape[1] > 1:
        first, second = squares.chunk(2, 1)
        squares = first + second
    return _usable(squares[:, 0].sqrt().float())


def from_rows(blocks: Tensor, out: Tensor) -> Tensor:
    """Write the elements of the blocks into `out`, without the padding."""
    return out.copy_(blocks.flatten()[: out.numel()])


def _usable(top: Tensor) -> Tensor:
    return top.where(top >= SMALLEST, 0).where(top.isfinite(), torch.nan)
