"""Trits: elements as -1, 0 or 1 times the scale of their block, drawn at random. What TernGrad sends.

The code of a trit is itself in two bits, so 3 is -1; 2 is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.blocks import from_rows, rows
from shoal.codecs.packing import packed, unpacked
from shoal.core.codec import State

SMALLEST = 2.0**-80  # a block with nothing larger travels as zeros: so that STEPS / scale is a float32
STEPS = 2**31 * (1 + 2.0**-22)  # to the scale; a little more, so that it is all however a division is rounded


def noise(state: State, block: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table of as many draws as a block has elements, and a mask for each block: for `written`.

    They have 24 bits; the 64 below puts them into the middle of what they stand for.
    """
    drawn = (draws.uniform(state, block + blocks, device) * 2**24).int() << 7
    return drawn[:block] + 64, drawn[block:]


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
    """The codes: an element in steps and a draw of as many make a whole scale together, or they do not.

    The draws of a block are those of the table, with the bits of its mask flipped: so any two of them are
    independent, and a draw costs one step.
    """
    steps = rows(u, block) * (STEPS / scales)[:, None]
    steps = steps.double().clamp(-(2**31), 2**31 - 1).nan_to_num(0).long()
    trits = (steps + (table ^ masks[:, None])) >> 31
    return packed(trits.flatten()[: u.numel()] & 3, 2)


def read(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> Tensor:
    """Write what they stand for into `out`."""
    trits = (unpacked(codes, 2, out.numel()) ^ 2) - 2  # bit 1 is the sign
    return from_rows(rows(trits, block) * scales[:, None], out)


def strange(codes: Tensor) -> bool:
    """Whether a code is 2."""
    return bool((codes & ~(codes << 1) & -0x55555556).any())
