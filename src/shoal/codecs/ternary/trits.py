"""Trits: each element as -1, 0 or 1 times the scale of its block, drawn at random. The PyTorch code.

A trit has two bits. The lower is 1 unless the trit is 0, the upper is the sign of the element: 2 is -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.blocks import from_rows, rows
from shoal.codecs.packing import packed, unpacked
from shoal.core.codec import State

SMALLEST = 2.0**-80  # a block with nothing larger is sent as zeros, so that 1 / scale is a float32
ONE = 0x3F800000  # the bits of 1.0, as a float32


def noise(state: State, block: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For `written`: a table with a draw for each element of a block, and a mask for each block.

    A draw is the bits of a float in [1, 2), of which the lower 23 are random. So are those of a mask.
    """
    drawn = (draws.uniform(state, block + blocks, device) * 2**23).int()
    return drawn[:block] | ONE, drawn[block:]


def scale(u: Tensor, clip: float, block: int) -> Tensor:
    """The scale of each block: its largest magnitude, but at most `clip` standard deviations, unless 0.

    Deviations are from 0: from the mean, a block of equal elements would have none, and vanish.
    """
    blocks = rows(u, block)
    top = blocks.abs().amax(1)
    limit = top
    if clip:
        length = rows(torch.ones_like(u), block).sum(1)
        limit = (clip * (blocks.double().square().sum(1) / length).sqrt()).float()
    return top.minimum(limit).where(top >= SMALLEST, 0).where(top.isfinite(), torch.nan)


def written(u: Tensor, scales: Tensor, block: int, table: Tensor, masks: Tensor) -> Tensor:
    """The trits: an element is sent as its scale if its magnitude, in scales, plus its draw reach 2.

    The sum is rounded once, to nearest. So an element as large as the scale is always sent, and any other
    with a probability that is its magnitude, to 2^-24 of the scale. The draws of a block are those of the
    table, with the bits of its mask flipped: any two are independent, and a draw costs one instruction. If
    the scale is NaN, all codes are 0.
    """
    each = (1 / scales).where(scales > 0, 0)
    elements, drawn = rows(u, block), (table ^ masks[:, None]).view(torch.float32)
    sums = (elements.abs().double() * each.double()[:, None] + drawn.double()).float()
    codes = (~(sums < 2)).long() + 2 * elements.signbit().long()
    codes *= ~scales.isnan()[:, None]
    return packed(codes.flatten()[: u.numel()], 2)


def read(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> Tensor:
    """Decode into `out`."""
    kinds = unpacked(codes, 2, out.numel())
    trits = (kinds & 1) * (1.0 - (kinds & 2))
    return from_rows(rows(trits, block) * scales[:, None], out)
