"""The update and selection of `chunk_selection.py` on a GPU: one pass, a program for each chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.core.parameter_chunks import ParameterChunks

LONGEST = 16384  # elements of a chunk that a program keeps in registers
# Arguments whose value (1, or a multiple of 16) must not make Triton compile the kernel again.
NUMBERS = ["begin", "columns", "height", "width", "k"]


def able(each: ParameterChunks) -> bool:
    """Whether the kernel takes chunks of that length."""
    return each.length <= LONGEST


def update(each: ParameterChunks, k: int, error: Tensor, decay: float, start: Tensor, x: Tensor) -> Tensor:
    """error ← decay error + start - x for one parameter; the places of the largest k of each chunk."""
    places = torch.empty(each.number, k, dtype=torch.int64, device=error.device)
    sides = each.begin, each.columns, each.height, each.width
    tile = triton.next_power_of_2(each.length)
    # without fusion, products are rounded before they are added, as PyTorch does it
    _update[(each.number,)](error, start, x, decay, *sides, k, places, tile, enable_fp_fusion=False)
    return places


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    error, start, x, decay, begin, columns, height, width, k, places, TILE: tl.constexpr
):
    chunk, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    across, inside = columns // width, at < height * width
    corner = begin + chunk // across * height * columns + chunk % across * width
    place = corner + (at // width).to(tl.int64) * columns + at % width
    moved = tl.load(start + place, inside, 0.0) - tl.load(x + place, inside, 0.0)
    total = tl.load(error + place, inside, 0.0) * decay + moved
    tl.store(error + place, total, inside)
    sizes = tl.where(inside, total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # in the order of floats
    edge = 0
    for bit in range(31):  # the k-th largest, from its highest bit on
        trial = edge | (1 << (30 - bit))
        edge = tl.where(tl.sum((sizes >= trial).to(tl.int32)) >= k, trial, edge)
    above, ties = sizes > edge, sizes == edge
    left = k - tl.sum(above.to(tl.int32))
    chosen = above | (ties & (tl.cumsum(ties.to(tl.int32)) <= left))
    rank = tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(places + chunk * k + rank, at.to(tl.int64), chosen)
