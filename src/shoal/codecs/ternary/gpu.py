"""Trits on a GPU: each program reads a few blocks once, and writes codes, scales and compression error.

A program draws its table once, for all of its blocks. The arithmetic is that of `trits.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs import draws, packing
from shoal.codecs.ternary import trits
from shoal.codecs.tiles_gpu import NUMBERS, header, in_eight, load, programs, right, store
from shoal.core.codec import Payload

TILE = 2048  # elements that a program encodes at a time, or a block if that is longer
WARP, ALONE = 1024, 2048  # elements per warp, with a residual and without
LONGEST = 8192  # the longest block that fits into registers
GROUP = 256
PROGRAMS = 8  # per multiprocessor, to encode
DECODE_TILE, DECODE_WARPS, DECODE_PROGRAMS = 4096, 4, 60
ONE, SMALLEST = tl.constexpr(trits.ONE), tl.constexpr(trits.SMALLEST)
GAMMA, FIRST, SECOND = (tl.constexpr(word) for word in (draws.GAMMA, draws.FIRST, draws.SECOND))
SIGN, CODE = tl.constexpr(-(2**31)), tl.constexpr(-(2**30))
TINY, HUGE = tl.constexpr(2.0**-40), tl.constexpr(2.0**50)  # the squares of all in between fit a float32


def able(block: int) -> bool:
    """Whether the kernels take blocks of that length."""
    return block % GROUP == 0 and block & (block - 1) == 0 and block <= LONGEST


def encode(code: int, v: Tensor, rest: Tensor | None, clip: float, block: int, begin: int) -> Payload:
    """The payload of `v`, or of `v + rest`, with draws from word `begin` on; `rest` becomes the error."""
    n, tile, blocks = v.numel(), max(TILE, block), triton.cdiv(v.numel(), block)
    few = programs(n, tile, PROGRAMS, v.device)
    codes = torch.empty(packing.words(n, 2), dtype=torch.int32, device=v.device)
    scales = torch.empty(blocks, device=v.device)
    sums = torch.empty(few, dtype=torch.int64, device=v.device)
    given = (v, v if rest is None else rest, codes, scales, sums, float(clip), begin, n, blocks)
    warp = ALONE if rest is None else WARP
    _encode[(few,)](*given, block, tile, warp, rest is not None, num_warps=tile // warp)
    return header(sums, code, n, blocks, codes, scales), codes, scales


def decode(code: int, payload: Payload, block: int, out: Tensor) -> bool:
    """Decode into `out`; return whether the payload passed its checks. The caller has checked the lengths."""
    head, codes, scales = payload
    n, blocks = out.numel(), scales.numel()
    few = programs(n, DECODE_TILE, DECODE_PROGRAMS, out.device)
    sums = torch.empty(2 * few, dtype=torch.int64, device=out.device)
    _decode[(few,)](codes, scales, out, sums, n, blocks, block, DECODE_TILE, num_warps=DECODE_WARPS)
    return right(head, sums, code, n, blocks, codes, scales)


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
    table = _as_blocks(_drawn(word, at % BLOCK) | ONE, TILE, BLOCK)
    groups, lanes = tl.arange(0, GROUPS)[:, None], tl.arange(0, 16)[None, :]
    held, more = tl.zeros((GROUPS, 16), tl.int64), tl.zeros((TILE // BLOCK,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        begin, blocks = tl.cast(tile, tl.int64) * TILE, tile * (TILE // BLOCK) + rows
        left = tl.minimum(n - begin, TILE).to(tl.int32)
        u = load(v + begin, at, left, TILE)
        if RESTS:
            u += load(rest + begin, at, left, TILE)
        u = _as_blocks(u, TILE, BLOCK)
        scale = _scale_of(u, clip, tl.minimum(tl.maximum(left - rows * BLOCK, 1), BLOCK))
        tl.store(scales + blocks, scale, rows * BLOCK < left)
        upper = _codes_of(u, scale, table ^ _drawn(word, BLOCK + blocks)[:, None])
        if RESTS:
            lacks = tl.fma(upper.to(tl.float32, bitcast=True), (-0.5 * scale)[:, None], u)
            store(rest + begin, at, _as_read(lacks, TILE, WARP), left, TILE)
        kinds = tl.reshape((upper >> 30) & 3, (GROUPS, 16, 16))  # 0 beyond the end, where elements are 0
        bits = tl.sum(kinds << (2 * tl.arange(0, 16))[None, :, None], 1)
        tl.store(codes + begin // 16 + groups * 16 + lanes, bits, groups * 256 < left)
        held += in_eight(bits, lanes)
        single = in_eight(scale.to(tl.int32, bitcast=True), blocks)
        single *= tl.where(blocks + count % 2 == count, 1, 5)  # the last of an odd count is half a word
        more += tl.where(rows * BLOCK < left, single, 0)
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + tl.sum(more))


@triton.jit  # type: ignore[untyped-decorator]
def _as_blocks(x, TILE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile as one row per block; it was read as one row per warp, 128 elements at a time.

    So a warp has consecutive elements, and no other warp has part of their packed words.
    """
    return tl.reshape(tl.permute(x, (1, 0, 2)), (TILE // BLOCK, BLOCK))


@triton.jit  # type: ignore[untyped-decorator]
def _as_read(x, TILE: tl.constexpr, WARP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of `_as_blocks`."""
    return tl.permute(tl.reshape(x, (TILE // WARP, WARP // 128, 128)), (1, 0, 2))


@triton.jit
def _drawn(word, places):  # type: ignore[no-untyped-def]
    """The draws, of 23 bits, at these places of the stream whose first word is mixed from `word`."""
    mixed = word.to(tl.uint64) + (places // 2).to(tl.uint64) * GAMMA
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = mixed ^ (mixed >> 31)
    half = tl.where(places % 2 == 0, mixed & 0xFFFFFFFF, mixed >> 32)
    return (half >> 9).to(tl.int32)


@triton.jit
def _scale_of(u, clip, length):  # type: ignore[no-untyped-def]
    """The scale of each row, of which `length` elements are inside the vector."""
    bits = tl.max(u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of integers, NaN is the largest
    top = bits.to(tl.float32, bitcast=True)
    deviation = tl.sqrt(tl.sum(u * u, 1) / length)
    if tl.max(((top <= TINY) | (top >= HUGE)).to(tl.int32), 0) == 1:
        power = tl.minimum(tl.maximum(0x7F000000 - (bits & 0x7F800000), 0x00800000), 0x7E000000)
        part = u * power.to(tl.float32, bitcast=True)[:, None]  # at most about 1
        deviation = (0x7F000000 - power).to(tl.float32, bitcast=True) * tl.sqrt(
            tl.sum(part * part, 1) / length
        )
    scale = tl.where(clip > 0, tl.minimum(top, clip * deviation), top)
    scale = tl.where(top >= SMALLEST, scale, 0.0)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _codes_of(u, scale, noise):  # type: ignore[no-untyped-def]
    """The trits in the upper two bits of words: the sign, and whether the element is sent as its scale.

    As floats, these words are 2, 0, -0 and -2. All are 0 where the scale is NaN.
    """
    each = tl.where(scale > 0.0, tl.math.div_rn(1.0, scale), 0.0)[:, None]
    signed = noise | (u.to(tl.int32, bitcast=True) & SIGN)
    sums = tl.fma(u, each, signed.to(tl.float32, bitcast=True))
    return sums.to(tl.int32, bitcast=True) & tl.where(scale == scale, CODE, 0)[:, None]


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _decode(codes, scales, out, sums, n, count, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    begins, lanes, rows = tl.arange(0, TILE // 256) * 256, tl.arange(0, 16), tl.arange(0, 16)[None, :, None]
    at = begins[:, None, None] + rows * 16 + lanes[None, None, :]
    held, more = tl.zeros((TILE // 256, 16), tl.int64), tl.zeros((TILE // 256,), tl.int64)
    negative = tl.zeros((TILE // 256,), tl.int32)
    tile, step = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(0)
    bits, scale = _read(codes, scales, tile * TILE, n, BLOCK, TILE)
    for _ in range(tl.program_id(0), tl.cdiv(n, TILE), step):
        begin = tile * TILE
        tile += step
        soon, its = _read(codes, scales, tile * TILE, n, BLOCK, TILE)  # loads while this tile is written
        upper = (bits[:, None, :] << (30 - 2 * rows)) & CODE  # the floats 2, 0, -0 and -2
        x = upper.to(tl.float32, bitcast=True) * (0.5 * scale)[:, None, None]
        store(out + begin, at, x, tl.minimum(n - begin, TILE).to(tl.int32), TILE)
        negative |= (scale < 0).to(tl.int32)
        held += in_eight(bits, lanes[None, :])
        blocks = (begin + begins) // BLOCK
        single = in_eight(scale.to(tl.int32, bitcast=True), blocks)
        single *= tl.where(blocks + count % 2 == count, 1, 5)
        more += tl.where((begin + begins) % BLOCK == 0, single, 0)  # each block counts once
        bits, scale = soon, its
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + tl.sum(more))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.max(negative, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _read(codes, scales, begin, n, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a tile, and the scales of their blocks; zeros beyond the end."""
    begins = begin + tl.arange(0, TILE // 256) * 256
    bits = tl.load(codes + begins[:, None] // 16 + tl.arange(0, 16)[None, :], (begins < n)[:, None], 0)
    return bits, tl.load(scales + begins // BLOCK, begins < n, 0.0)
