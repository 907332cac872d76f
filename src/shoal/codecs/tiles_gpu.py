"""What GPU kernels share: tiles of a vector, and a header that is written and checked on the GPU.

A program works on one tile after the other, and stores what its share of the bodies adds to the checksum. A
small kernel, queued behind the large one, adds these sums up. So the CPU never waits for the GPU while
encoding, and once after decoding, for two numbers. It does not even wait for those if the payload consists of
the very tensors that this process encoded: nothing can have damaged them.
"""

from __future__ import annotations

from functools import cache
from weakref import ref

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.codecs.wire import eights, numbers

# Arguments whose value (1, or a multiple of 16) must not make Triton compile the kernel again.
NUMBERS = ["programs", "first", "n", "count", "check", "word"]
MOST = 8192  # programs
WRITTEN_WITH = "written_with"  # the attribute by which a header encoded here knows its bodies


@cache
def programs(n: int, tile: int, each: int, device: torch.device) -> int:
    """How many programs share a vector: `each` per multiprocessor, at most one per tile."""
    return min(-(-n // tile), each * torch.cuda.get_device_properties(device).multi_processor_count, MOST)


def header(sums: Tensor, code: int, n: int, count: int, *bodies: Tensor) -> Tensor:
    """The header of these bodies; `sums` has what each program adds to the checksum."""
    words = sums.new_empty(4)
    _write[(1,)](words, sums, sums.numel(), *numbers(code, n, count, *bodies), MOST, num_warps=8)
    made = words.view(torch.uint8)
    if not made.is_inference():  # inference tensors do not count their changes
        setattr(made, WRITTEN_WITH, ((code, n, count), [(ref(body), body._version) for body in bodies]))
    return made


def right(header: Tensor, sums: Tensor, code: int, n: int, count: int, *bodies: Tensor) -> bool:
    """Whether the header fits the bodies; `sums` has a checksum, then a fault flag, from each program."""
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
    """The elements of a tile, of which `left` are inside the vector; zeros for the others."""
    if left == TILE:  # without a mask, one instruction loads four elements
        x = tl.load(place + at)
    else:
        x = tl.load(place + at, at < left, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def store(place, at, x, left, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the elements of a tile that are inside the vector."""
    if left == TILE:
        tl.store(place + at, x)
    else:
        tl.store(place + at, x, at < left)


@triton.jit
def in_eight(bits, place):  # type: ignore[no-untyped-def]
    """What the four-byte word at that position adds to a sum of eight-byte words."""
    return bits.to(tl.uint32, bitcast=True).to(tl.int64) << (32 * (place % 2))
