"""One bit read back on a GPU, and its checksum with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.kernels.tiles_gpu import NUMBERS, in_eight, programs, right, store
from shoal.core.codec import Payload

TILE, WARPS = 4096, 4  # elements at a time
PROGRAMS = 60  # for each multiprocessor


def decode(code: int, payload: Payload, column: int, out: Tensor) -> bool:
    """Write what it stands for into `out`; whether it is right. Its parts must have their lengths."""
    header, signs, values = payload
    n = out.numel()
    few = programs(n, TILE, PROGRAMS, out.device)
    sums = torch.empty(2 * few, dtype=torch.int64, device=out.device)
    _decode[(few,)](signs, values, out, sums, n, column, TILE, num_warps=WARPS)
    return right(header, sums, code, n, values.numel() // 2, signs, values)


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
        soon, lower, higher = _read(
            signs, values, tile * TILE, n, COLUMN, TILE
        )  # while the others are written
        above = (bits[:, None, :] >> rows) & 1
        x = tl.where(above != 0, high[:, None, None], low[:, None, None])
        store(out + begin, at, x, tl.minimum(n - begin, TILE).to(tl.int32), TILE)
        held += in_eight(bits, lanes[None, :])
        both = in_eight(low.to(tl.int32, bitcast=True), 0) + in_eight(high.to(tl.int32, bitcast=True), 1)
        more += tl.where((begin + begins) % COLUMN == 0, both, 0)  # a column counts once
        bits, low, high = soon, lower, higher
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + 5 * tl.sum(more))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), 0)  # no bit is strange


@triton.jit  # type: ignore[untyped-decorator]
def _read(signs, values, begin, n, COLUMN: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a tile, and the means of their columns; zeros behind the end."""
    begins = begin + tl.arange(0, TILE // 512) * 512
    here, pairs = begins < n, values + 2 * (begins // COLUMN)
    bits = tl.load(signs + begins[:, None] // 32 + tl.arange(0, 16)[None, :], here[:, None], 0)
    return bits, tl.load(pairs, here, 0.0), tl.load(pairs + 1, here, 0.0)
