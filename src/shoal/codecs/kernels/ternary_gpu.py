"""Trits on a GPU: each program reads a few blocks once, and writes their codes, scales and rest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.trits import SMALLEST, STEPS, strange

__all__ = ["able", "decode", "encode", "strange"]

TILE = 2048  # elements that a program takes, or a block if that is longer
LONGEST = 8192  # a block that its registers hold
GROUP = 256

Noise = tuple[Tensor, Tensor]


def able(block: int) -> bool:
    """Whether it knows blocks of that length."""
    return block % GROUP == 0 and block & (block - 1) == 0 and block <= LONGEST


def encode(
    v: Tensor, rest: Tensor | None, clip: float, block: int, noise: Noise, codes: Tensor, scales: Tensor
) -> None:
    """Write the codes and scales of `v`, or of `v + rest`; leave in `rest` what they lack."""
    n, blocks = v.numel(), max(1, TILE // block)
    given = (v, v if rest is None else rest, *noise, codes, scales, n, float(clip), STEPS, SMALLEST)
    if n:
        _encode[(triton.cdiv(n, blocks * block),)](*given, block, blocks, rest is not None)


def decode(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write what they stand for into `out`."""
    n = out.numel()
    if n:
        _decode[(triton.cdiv(n, TILE),)](codes, scales, out, n, block, TILE // GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    v,
    rest,
    table,
    masks,
    codes,
    scales,
    n,
    clip,
    steps,
    smallest,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RESTS: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here, begins = at < n, blocks * BLOCK < n
    u = tl.load(v + at, here, 0.0)
    if RESTS:
        u += tl.load(rest + at, here, 0.0)
    bits = tl.max(u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # so that what is not a number is largest
    top = bits.to(tl.float32, bitcast=True)
    part = u / tl.where(top >= smallest, top, 1.0)[:, None]  # their squares fit a float
    length = tl.maximum(tl.minimum(n - blocks * BLOCK, BLOCK), 1)
    deviation = top * tl.sqrt(tl.sum(part * part, 1) / length)
    scale = tl.where(clip > 0, tl.minimum(top, clip * deviation), top)
    scale = tl.where(top >= smallest, scale, 0.0)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    tl.store(scales + blocks, scale, begins)
    x = u * tl.math.div_rn(steps, scale)[:, None]
    inside = (x > -2147483648.0) & (x < 2147483648.0)  # is not true of what is not a number either
    whole = tl.where(inside, x, 0.0).to(tl.int32)
    whole = tl.where(x >= 2147483648.0, 2147483647, tl.where(x <= -2147483648.0, -2147483648, whole))
    drawn = tl.load(table + tl.arange(0, BLOCK))[None, :] ^ tl.load(masks + blocks, begins, 0)[:, None]
    trits = ((whole >> 1) + (drawn >> 1) + (whole & drawn & 1)) >> 30  # as the sum >> 31, which would not fit
    if RESTS:
        tl.store(rest + at, u - trits.to(tl.float32) * scale[:, None], here)
    kinds = tl.reshape(tl.where(here, trits & 3, 0), (BLOCKS * BLOCK // 256, 16, 16))
    words = tl.sum(kinds << (2 * tl.arange(0, 16))[None, :, None], 1)
    groups = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK // 256) + tl.arange(0, BLOCKS * BLOCK // 256)
    place = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes + place, words, (groups * 256 < n)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes, scales, out, n, block, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    begins = groups * 256 < n
    words = tl.load(codes + groups[:, None] * 16 + tl.arange(0, 16)[None, :], begins[:, None], 0)
    scale = tl.load(scales + groups * 256 // block, begins, 0.0)
    rows = tl.arange(0, 16)[None, :, None]
    trits = (((words[:, None, :] >> (2 * rows)) & 3) ^ 2) - 2
    at = groups[:, None, None] * 256 + rows * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(out + at, trits.to(tl.float32) * scale[:, None, None], at < n)
