"""Trits: elements as -1, 0 or 1 times the scale of their block, drawn at random. What TernGrad sends.

Of the two bits of a code, the lower says whether it is not 0, the upper is the element's sign: 2 is -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.blocks import from_rows, rows
from shoal.codecs.packing import packed, unpacked
from shoal.core.codec import State

SMALLEST = 2.0**-80  # a block with nothing larger travels as zeros: so that 1 / scale is a float32
ONE = 0x3F800000  # the bits of 1.0, as a float32


def noise(state: State, block: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table of as many draws as a block has elements, and a mask for each block: for `written`.

    A draw is a float from 1 on and below 2, as bits, of which the lower 23 are random; so are a mask's.
    """
    drawn = (draws.uniform(state, block + blocks, device) * 2**23).int()
    return drawn[:block] | ONE, drawn[block:]


def scale(u: Tensor, clip: float, block: int) -> Tensor:
    """Of each block: the largest magnitude, but at most `clip` standard deviations about 0, unless 0.

    About the mean, a block of equal elements would have no deviation, and vanish.
    """
    blocks = rows(u, block)
    top = blocks.abs().amax(1)
    limit = top
    if clip:
        length = rows(torch.ones_like(u), block).sum(1)
        limit = (clip * (blocks.double().square().sum(1) / length).sqrt()).float()
    return top.minimum(limit).where(top >= SMALLEST, 0).where(top.isfinite(), torch.nan)


def written(u: Tensor, scales: Tensor, block: int, table: Tensor, masks: Tensor) -> Tensor:
    """The codes: a magnitude in scales and a draw make 2 together, or they do not.

    They are added up with one rounding, to the nearest: so the whole scale does, and the part of the draws
    that do is the magnitude, to 2^-24 of the scale. The draws of a block are those of the table, with the
    bits of its mask flipped: so any two of them are independent, and a draw costs one step. Where the scale
    is no number, all codes are 0.
    """
    each = (1 / scales).where(scales > 0, 0)
    elements, drawn = rows(u, block), (table ^ masks[:, None]).view(torch.float32)
    sums = (elements.abs().double() * each.double()[:, None] + drawn.double()).float()
    codes = (~(sums < 2)).long() + 2 * elements.signbit().long()
    codes *= ~scales.isnan()[:, None]
    return packed(codes.flatten()[: u.numel()], 2)


def read(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> Tensor:
    """Write what they stand for into `out`."""
    kinds = unpacked(codes, 2, out.numel())
    trits = (kinds & 1) * (1.0 - (kinds & 2))
    return from_rows(rows(trits, block) * scales[:, None], out)
