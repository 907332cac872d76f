"""What kernels for GPUs share: a vector in tiles, and a header that is made and checked beside its bodies.

A program takes one tile after the other, and leaves what its part of the bodies adds to the checksum. A small
kernel adds that up, which is started while the large one runs. So the processor never waits for the device
while encoding, and once, for two numbers, after decoding; but not even then if a payload consists of the very
tensors that were written here: nothing can have damaged it on the way.
"""

from __future__ import annotations

from functools import cache
from weakref import ref

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.wire import eights, numbers

# What Triton should not compile a kernel anew for, where it is a multiple of 16, or 1.
NUMBERS = ["programs", "first", "n", "count", "check", "word"]
MOST = 8192  # programs
WRITTEN_WITH = "written_with"  # what a header that was made here knows of its bodies


@cache
def programs(n: int, tile: int, each: int, device: torch.device) -> int:
    """How many share a vector: so many on each multiprocessor, but no more than there are tiles."""
    return min(-(-n // tile), each * torch.cuda.get_device_properties(device).multi_processor_count, MOST)


def header(sums: Tensor, code: int, n: int, count: int, *bodies: Tensor) -> Tensor:
    """The header of these bodies, whose programs have left such sums."""
    words = sums.new_empty(4)
    _write[(1,)](words, sums, sums.numel(), *numbers(code, n, count, *bodies), MOST, num_warps=8)
    made = words.view(torch.uint8)
    if not made.is_inference():  # whose bodies do not know whether they were changed
        setattr(made, WRITTEN_WITH, ((code, n, count), [(ref(body), body._version) for body in bodies]))
    return made


def right(header: Tensor, sums: Tensor, code: int, n: int, count: int, *bodies: Tensor) -> bool:
    """Whether a header fits these bodies; their programs have left a sum each, and then what is strange."""
    about, known = getattr(header, WRITTEN_WITH, (None, ()))
    if about == (code, n, count) and header._version == 0 and all(map(_untouched, bodies, known)):
        return True
    trouble, programs = sums.new_empty(2), sums.numel() // 2
    given = (trouble, eights(header), sums, programs, *numbers(code, n, count, *bodies))
    _check[(1,)](*given, MOST, num_warps=8)
    return not any(trouble.tolist())


def _untouched(body: Tensor, known: tuple[ref[Tensor], int]) -> bool:
    own, version = known
    return body is own() and body._version == version


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _write(header, sums, programs, first, n, count, check, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    each = tl.arange(0, MOST)
    tl.store(header, first)
    tl.store(header + 1, n)
    tl.store(header + 2, count)
    tl.store(header + 3, check + tl.sum(tl.load(sums + each, each < programs, 0)))


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _check(trouble, header, sums, programs, first, n, count, check, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    each = tl.arange(0, MOST)
    held = tl.sum(tl.load(sums + each, each < programs, 0))
    strange = tl.max(tl.load(sums + programs + each, each < programs, 0), 0)
    strange |= (tl.load(header) ^ first) | (tl.load(header + 1) ^ n) | (tl.load(header + 2) ^ count)
    tl.store(trouble, check + held - tl.load(header + 3))
    tl.store(trouble + 1, strange)


@triton.jit  # type: ignore[untyped-decorator]
def load(place, at, left, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a tile of which so many are left; zeros behind them."""
    if left == TILE:  # without a mask, four elements are one instruction whatever the vector's length
        x = tl.load(place + at)
    else:
        x = tl.load(place + at, at < left, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def store(place, at, x, left, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write them."""
    if left == TILE:
        tl.store(place + at, x)
    else:
        tl.store(place + at, x, at < left)


@triton.jit
def in_eight(bits, place):  # type: ignore[no-untyped-def]
    """What the word of four bytes at that place adds to the sum of words of eight."""
    return bits.to(tl.uint32, bitcast=True).to(tl.int64) << (32 * (place % 2))
