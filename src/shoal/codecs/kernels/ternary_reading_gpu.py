"""Trits read back on a GPU, and their checksum with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.kernels.ternary_drawing_gpu import CODE
from shoal.codecs.kernels.tiles_gpu import NUMBERS, in_eight, programs, right, store
from shoal.core.codec import Payload

TILE, WARPS = 4096, 4  # elements at a time
PROGRAMS = 60  # for each multiprocessor


def decode(code: int, payload: Payload, block: int, out: Tensor) -> bool:
    """Write what it stands for into `out`; whether it is right. Its parts must have their lengths."""
    header, codes, scales = payload
    n, blocks = out.numel(), scales.numel()
    few = programs(n, TILE, PROGRAMS, out.device)
    sums = torch.empty(2 * few, dtype=torch.int64, device=out.device)
    _decode[(few,)](codes, scales, out, sums, n, blocks, block, TILE, num_warps=WARPS)
    return right(header, sums, code, n, blocks, codes, scales)


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
        soon, its = _read(codes, scales, tile * TILE, n, BLOCK, TILE)  # while the others are written
        upper = (bits[:, None, :] << (30 - 2 * rows)) & CODE  # the floats 2, 0, -0 and -2
        x = upper.to(tl.float32, bitcast=True) * (0.5 * scale)[:, None, None]
        store(out + begin, at, x, tl.minimum(n - begin, TILE).to(tl.int32), TILE)
        negative |= (scale < 0).to(tl.int32)
        held += in_eight(bits, lanes[None, :])
        blocks = (begin + begins) // BLOCK
        single = in_eight(scale.to(tl.int32, bitcast=True), blocks)
        single *= tl.where(blocks + count % 2 == count, 1, 5)
        more += tl.where((begin + begins) % BLOCK == 0, single, 0)  # a block counts once
        bits, scale = soon, its
    tl.store(sums + tl.program_id(0), 3 * tl.sum(held) + tl.sum(more))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.max(negative, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _read(codes, scales, begin, n, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a tile, and the scales of their blocks; zeros behind the end."""
    begins = begin + tl.arange(0, TILE // 256) * 256
    bits = tl.load(codes + begins[:, None] // 16 + tl.arange(0, 16)[None, :], (begins < n)[:, None], 0)
    return bits, tl.load(scales + begins // BLOCK, begins < n, 0.0)
