"""Two-byte floats on a GPU. The checksum is part of the same pass: its own would take as long again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.tiles_gpu import NUMBERS, header, load, programs, right, store
from shoal.core.codec import Payload

TILE, WARPS = 2048, 4  # elements at a time
PROGRAMS = 60  # for each multiprocessor
LARGEST = tl.constexpr(65504.0)


def encode(code: int, v: Tensor, dtype: torch.dtype) -> Payload:
    """The payload of `v`; out of range becomes the largest half."""
    n = v.numel()
    few = programs(n, TILE, PROGRAMS, v.device)
    short = torch.empty(n, dtype=dtype, device=v.device)
    sums = torch.empty(few, dtype=torch.int64, device=v.device)
    _encode[(few,)](v, short, sums, n, TILE, dtype == torch.float16, num_warps=WARPS)
    return header(sums, code, n, n, short), short


def decode(code: int, payload: Payload, out: Tensor) -> bool:
    """Decode into `out`; return whether the payload passed its checks. The caller has checked its length."""
    head, short = payload
    n = out.numel()
    few = programs(n, TILE, PROGRAMS, out.device)
    sums = torch.empty(2 * few, dtype=torch.int64, device=out.device)
    _decode[(few,)](short, out, sums, n, TILE, num_warps=WARPS)
    return right(head, sums, code, n, n, short)


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _encode(v, short, sums, n, TILE: tl.constexpr, CLAMP: tl.constexpr):  # type: ignore[no-untyped-def]
    at, held = tl.arange(0, TILE), tl.zeros((TILE,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        left = tl.minimum(n - begin, TILE).to(tl.int32)
        kept = _kept(load(v + begin, at, left, TILE), short, CLAMP)
        store(short + begin, at, kept, left, TILE)
        held += _bits(kept)
    tl.store(sums + tl.program_id(0), _total(held, at, _kept(_tail(v, n), short, CLAMP)))


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _decode(short, out, sums, n, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at, held = tl.arange(0, TILE), tl.zeros((TILE,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        left = tl.minimum(n - begin, TILE).to(tl.int32)
        kept = load(short + begin, at, left, TILE)
        store(out + begin, at, kept.to(tl.float32), left, TILE)
        held += _bits(kept)
    tl.store(sums + tl.program_id(0), _total(held, at, _tail(short, n)))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), 0)  # no invalid code to report


@triton.jit  # type: ignore[untyped-decorator]
def _kept(u, short, CLAMP: tl.constexpr):  # type: ignore[no-untyped-def]
    if CLAMP:  # NaN stays NaN
        u = tl.where(u > LARGEST, LARGEST, tl.where(u < -LARGEST, -LARGEST, u))
    return u.to(short.dtype.element_ty)


@triton.jit
def _bits(kept):  # type: ignore[no-untyped-def]
    return kept.to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _tail(place, n):  # type: ignore[no-untyped-def]
    """The elements after the last whole word of eight bytes, in the first program; zeros in the others."""
    at = n // 4 * 4 + tl.arange(0, 4)
    return tl.load(place + at, (at < n) & (tl.program_id(0) == 0), 0.0)


@triton.jit
def _total(held, at, tail):  # type: ignore[no-untyped-def]
    """The checksum of the body: whole words of eight bytes count three times, the tail once.

    `held` does not overflow an int32 before a program has added up 32768 tiles.
    """
    whole = tl.sum(held.to(tl.int64) << (16 * (at % 4)))
    return 3 * whole - 2 * tl.sum(_bits(tail).to(tl.int64) << (16 * tl.arange(0, 4)))
