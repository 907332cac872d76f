"""Trits on a GPU: each program reads a few blocks once, and writes their codes, scales and rest.

It draws its table once, for all blocks that it takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs import packing, trits
from shoal.codecs.kernels.ternary_drawing_gpu import as_blocks, as_read, codes_of, drawn, scale_of
from shoal.codecs.kernels.ternary_reading_gpu import decode
from shoal.codecs.kernels.tiles_gpu import NUMBERS, header, in_eight, load, programs, store
from shoal.core.codec import Payload

__all__ = ["able", "decode", "encode"]

TILE = 2048  # elements at a time, or a block if that is longer
WARP, ALONE = 1024, 2048  # of these for each warp, with a rest and without
LONGEST = 8192  # a block that registers hold
GROUP = 256
ONE = tl.constexpr(trits.ONE)
PROGRAMS = 8  # for each multiprocessor


def able(block: int) -> bool:
    """Whether it knows blocks of that length."""
    return block % GROUP == 0 and block & (block - 1) == 0 and block <= LONGEST


def encode(code: int, v: Tensor, rest: Tensor | None, clip: float, block: int, begin: int) -> Payload:
    """The payload of `v`, or of `v + rest`; leaves in `rest` what it lacks. Draws begin with that word."""
    n, tile, blocks = v.numel(), max(TILE, block), triton.cdiv(v.numel(), block)
    few = programs(n, tile, PROGRAMS, v.device)
    codes = torch.empty(packing.words(n, 2), dtype=torch.int32, device=v.device)
    scales = torch.empty(blocks, device=v.device)
    sums = torch.empty(few, dtype=torch.int64, device=v.device)
    given = (v, v if rest is None else rest, codes, scales, sums, float(clip), begin, n, blocks)
    warp = ALONE if rest is None else WARP
    _encode[(few,)](*given, block, tile, warp, rest is not None, num_warps=tile // warp)
    return header(sums, code, n, blocks, codes, scales), codes, scales


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    v,
    rest,
    codes,
    scales,
    sums,
    clip,
    word,
    n,
    count,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WARP: tl.constexpr,
    RESTS: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE // 256
    warps, reps = tl.arange(0, TILE // WARP)[None, :, None], tl.arange(0, WARP // 128)[:, None, None]
    at, rows = warps * WARP + reps * 128 + tl.arange(0, 128)[None, None, :], tl.arange(0, TILE // BLOCK)
    table = as_blocks(drawn(word, at % BLOCK) | ONE, TILE, BLOCK)
    groups, lanes = tl.arange(0, GROUPS)[:, None], tl.arange(0, 16)[None, :]
    held, more = tl.zeros((GROUPS, 16), tl.int64), tl.zeros((TILE // BLOCK,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        begin, blocks = tl.cast(tile, tl.int64) * TILE, tile * (TILE // BLOCK) + rows
        left = tl.minimum(n - begin, TILE).to(tl.int32)
        u = load(v + begin, at, left, TILE)
        if RESTS:
            u += load(rest + begin, at, left, TILE)
        u = as_blocks(u, TILE, BLOCK)
        scale = scale_of(u, clip, tl.minimum(tl.maximum(left - rows * BLOCK, 1), BLOCK))
        tl.store(scales + blocks, scale, rows * BLOCK < left)
        upper = codes_of(u, scale, table ^ drawn(word, BLOCK + blocks)[:, None])
        if RESTS:
            lacks = tl.fma(upper.to(tl.float32, bitcast=True), (-0.5 * scale)[:, None], u)
            store(rest + begin, at, as_read(lacks, TILE, WARP), left, TILE)
        kinds = tl.reshape((upper >> 30) & 3, (GROUPS, 16, 16))  # 0 behind the end, where there are zeros
        bits = tl.sum(kinds << (2 * tl.arange(0, 16))[None, :, None], 1)
        tl.store(codes + begin // 16 + groups * 16 + lanes, bits, groups * 256 < left)
        held += in_eight(bits, lanes)
        single = in_eight(scale.to(tl.int32, bitcast=True), blocks)
        single *= tl.where(blocks + count % 2 == count, 1, 5)  # the last of an odd number is no whole word
        more += tl.where(rows * BLOCK < left, single, 0)
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + tl.sum(more))
