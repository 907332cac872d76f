"""One bit on a GPU: each program reads a few columns once, and writes their bits, means and rest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs import packing
from shoal.codecs.kernels.one_bit_reading_gpu import decode
from shoal.codecs.kernels.tiles_gpu import NUMBERS, header, in_eight, load, programs, store
from shoal.core.codec import Payload

__all__ = ["able", "decode", "encode"]

TILE = 1024  # elements at a time, or a column if that is longer
WARP = 1024  # of these for each warp; several wait for each other at each sum of a column
LONGEST = 8192  # a column that registers hold
GROUP = 512
PROGRAMS = 16  # for each multiprocessor


def able(column: int) -> bool:
    """Whether it knows columns of that length."""
    return column % GROUP == 0 and column & (column - 1) == 0 and column <= LONGEST


def encode(code: int, v: Tensor, rest: Tensor | None, column: int) -> Payload:
    """The payload of `v`, or of `v + rest`; leaves in `rest` what it lacks."""
    n, tile, columns = v.numel(), max(TILE, column), triton.cdiv(v.numel(), column)
    few = programs(n, tile, PROGRAMS, v.device)
    signs = torch.empty(packing.words(n, 1), dtype=torch.int32, device=v.device)
    pairs = torch.empty(columns + few, dtype=torch.int64, device=v.device)  # and what programs leave
    given = (v, v if rest is None else rest, signs, pairs, n, columns)
    _encode[(few,)](*given, column, tile, rest is not None, num_warps=tile // WARP)
    values = pairs[:columns].view(torch.float32)
    return header(pairs[columns:], code, n, columns, signs, values), signs, values


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    v,
    rest,
    signs,
    pairs,
    n,
    count,
    COLUMN: tl.constexpr,
    TILE: tl.constexpr,
    RESTS: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE // 512
    begins = tl.arange(0, TILE // COLUMN) * COLUMN
    at = begins[:, None] + tl.arange(0, COLUMN)[None, :]
    groups, lanes = tl.arange(0, GROUPS)[:, None], tl.arange(0, 16)[None, :]
    held, more = tl.zeros((GROUPS, 16), tl.int64), tl.zeros((TILE // COLUMN,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        left = tl.minimum(n - begin, TILE).to(tl.int32)
        u = load(v + begin, at, left, TILE)
        if RESTS:
            u += load(rest + begin, at, left, TILE)
        below = u.to(tl.int32, bitcast=True) < 0
        few = tl.sum(below.to(tl.int32), 1)
        many = tl.minimum(left - begins, COLUMN) - few
        low = tl.math.div_rn(tl.sum(tl.where(below, u, 0.0), 1), tl.maximum(few, 1).to(tl.float32))
        high = tl.math.div_rn(tl.sum(tl.where(below, 0.0, u), 1), tl.maximum(many, 1).to(tl.float32))
        pair = in_eight(low.to(tl.int32, bitcast=True), 0) + in_eight(high.to(tl.int32, bitcast=True), 1)
        tl.store(pairs + (begin + begins) // COLUMN, pair, begins < left)
        more += tl.where(begins < left, pair, 0)
        if RESTS:
            store(rest + begin, at, u - tl.where(below, low[:, None], high[:, None]), left, TILE)
        above = tl.reshape(((at < left) & (below == 0)).to(tl.int32), (GROUPS, 32, 16))
        bits = tl.sum(above << tl.arange(0, 32)[None, :, None], 1)
        tl.store(signs + begin // 32 + groups * 16 + lanes, bits, groups * 512 < left)
        held += in_eight(bits, lanes)
    tl.store(pairs + count + tl.program_id(0), 3 * tl.sum(held) + 5 * tl.sum(more))
