"""One bit on a GPU: each program reads a few columns once, and writes their bits, means and rest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements that a program takes, or a column if that is longer
LONGEST = 8192  # a column that its registers hold
GROUP = 512


def able(column: int) -> bool:
    """Whether it knows columns of that length."""
    return column % GROUP == 0 and column & (column - 1) == 0 and column <= LONGEST


def encode(v: Tensor, rest: Tensor | None, column: int, signs: Tensor, values: Tensor) -> None:
    """Write the bits and means of `v`, or of `v + rest`; leave in `rest` what they lack."""
    n, columns = v.numel(), max(1, TILE // column)
    given = (v, v if rest is None else rest, signs, values, n, column, columns, rest is not None)
    if n:  # few warps: the fewer share a column, the less they wait for each other
        _encode[(triton.cdiv(n, columns * column),)](*given, num_warps=columns * column // TILE)


def decode(signs: Tensor, values: Tensor, column: int, out: Tensor) -> None:
    """Write what they stand for into `out`."""
    n = out.numel()
    if n:
        _decode[(triton.cdiv(n, TILE),)](signs, values, out, n, column, TILE // GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(v, rest, signs, values, n, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, RESTS: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = columns[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
    here = at < n
    u = tl.load(v + at, here, 0.0)
    if RESTS:
        u += tl.load(rest + at, here, 0.0)
    below = u.to(tl.int32, bitcast=True) < 0
    few = tl.sum(below.to(tl.int32), 1)
    many = tl.minimum(n - columns * COLUMN, COLUMN).to(tl.int32) - few
    low = tl.math.div_rn(tl.sum(tl.where(below, u, 0.0), 1), tl.maximum(few, 1).to(tl.float32))
    high = tl.math.div_rn(tl.sum(tl.where(below, 0.0, u), 1), tl.maximum(many, 1).to(tl.float32))
    begins = columns * COLUMN < n
    tl.store(values + 2 * columns, low, begins)
    tl.store(values + 2 * columns + 1, high, begins)
    if RESTS:
        tl.store(rest + at, u - tl.where(below, low[:, None], high[:, None]), here)
    above = tl.reshape((here & (below == 0)).to(tl.int32), (COLUMNS * COLUMN // 512, 32, 16))
    words = tl.sum(above << tl.arange(0, 32)[None, :, None], 1)
    groups = tl.program_id(0).to(tl.int64) * (COLUMNS * COLUMN // 512) + tl.arange(0, COLUMNS * COLUMN // 512)
    place = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(signs + place, words, (groups * 512 < n)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _decode(signs, values, out, n, column, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    begins = groups * 512 < n
    words = tl.load(signs + groups[:, None] * 16 + tl.arange(0, 16)[None, :], begins[:, None], 0)
    low = tl.load(values + 2 * (groups * 512 // column), begins, 0.0)
    high = tl.load(values + 2 * (groups * 512 // column) + 1, begins, 0.0)
    rows = tl.arange(0, 32)[None, :, None]
    above = (words[:, None, :] >> rows) & 1
    at = groups[:, None, None] * 512 + rows * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(out + at, tl.where(above != 0, high[:, None, None], low[:, None, None]), at < n)
