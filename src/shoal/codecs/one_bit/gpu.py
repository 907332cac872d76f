"""1-bit SGD on a GPU: each program reads a few columns once and writes signs, means and compression error."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs import packing
from shoal.codecs.tiles_gpu import NUMBERS, header, in_eight, load, programs, right, store
from shoal.core.codec import Payload

TILE = 1024  # elements that a program encodes at a time, or a column if that is longer
WARP = 1024  # elements per warp; more warps would wait for each other at each sum of a column
LONGEST = 8192  # the longest column that fits into registers
GROUP = 512
PROGRAMS = 16  # per multiprocessor, to encode
DECODE_TILE, DECODE_WARPS, DECODE_PROGRAMS = 4096, 4, 60


def able(column: int) -> bool:
    """Whether the kernels take columns of that length."""
    return column % GROUP == 0 and column & (column - 1) == 0 and column <= LONGEST


def encode(code: int, v: Tensor, rest: Tensor | None, column: int) -> Payload:
    """The payload of `v`, or of `v + rest`; `rest` becomes the compression error."""
    n, tile, columns = v.numel(), max(TILE, column), triton.cdiv(v.numel(), column)
    few = programs(n, tile, PROGRAMS, v.device)
    signs = torch.empty(packing.words(n, 1), dtype=torch.int32, device=v.device)
    pairs = torch.empty(columns + few, dtype=torch.int64, device=v.device)  # and the checksum of each program
    given = (v, v if rest is None else rest, signs, pairs, n, columns)
    _encode[(few,)](*given, column, tile, rest is not None, num_warps=tile // WARP)
    values = pairs[:columns].view(torch.float32)
    return header(pairs[columns:], code, n, columns, signs, values), signs, values


def decode(code: int, payload: Payload, column: int, out: Tensor) -> bool:
    """Decode into `out`; return whether the payload passed its checks. The caller has checked the lengths."""
    head, signs, values = payload
    n = out.numel()
    few = programs(n, DECODE_TILE, DECODE_PROGRAMS, out.device)
    sums = torch.empty(2 * few, dtype=torch.int64, device=out.device)
    _decode[(few,)](signs, values, out, sums, n, column, DECODE_TILE, num_warps=DECODE_WARPS)
    return right(head, sums, code, n, values.numel() // 2, signs, values)


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
    SHARE: tl.constexpr = 1.0 / COLUMN
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
        # a sum of shares of a column cannot overflow, and sharing by a power of two is exact
        low = tl.sum(tl.where(below, u, 0.0) * SHARE, 1)
        high = tl.sum(tl.where(below, 0.0, u) * SHARE, 1)
        low = tl.math.div_rn(low, tl.maximum(few, 1).to(tl.float32) * SHARE)
        high = tl.math.div_rn(high, tl.maximum(many, 1).to(tl.float32) * SHARE)
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


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _decode(signs, values, out, sums, n, COLUMN: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    begins, lanes, rows = tl.arange(0, TILE // 512) * 512, tl.arange(0, 16), tl.arange(0, 32)[None, :, None]
    at = begins[:, None, None] + rows * 16 + lanes[None, None, :]
    held, more = tl.zeros((TILE // 512, 16), tl.int64), tl.zeros((TILE // 512,), tl.int64)
    tile, step = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(0)
    bits, low, high = _read(signs, values, tile * TILE, n, COLUMN, TILE)
    for _ in range(tl.program_id(0), tl.cdiv(n, TILE), step):
        begin = tile * TILE
        tile += step
        # load the next tile while this one is written
        soon, lower, higher = _read(signs, values, tile * TILE, n, COLUMN, TILE)
        above = (bits[:, None, :] >> rows) & 1
        x = tl.where(above != 0, high[:, None, None], low[:, None, None])
        store(out + begin, at, x, tl.minimum(n - begin, TILE).to(tl.int32), TILE)
        held += in_eight(bits, lanes[None, :])
        both = in_eight(low.to(tl.int32, bitcast=True), 0) + in_eight(high.to(tl.int32, bitcast=True), 1)
        more += tl.where((begin + begins) % COLUMN == 0, both, 0)  # each column counts once
        bits, low, high = soon, lower, higher
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + 5 * tl.sum(more))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), 0)  # no invalid code to report


@triton.jit  # type: ignore[untyped-decorator]
def _read(signs, values, begin, n, COLUMN: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a tile, and the means of their columns; zeros beyond the end."""
    begins = begin + tl.arange(0, TILE // 512) * 512
    here, pairs = begins < n, values + 2 * (begins // COLUMN)
    bits = tl.load(signs + begins[:, None] // 32 + tl.arange(0, 16)[None, :], here[:, None], 0)
    return bits, tl.load(pairs, here, 0.0), tl.load(pairs + 1, here, 0.0)
