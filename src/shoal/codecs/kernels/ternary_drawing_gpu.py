"""The draws, the scale and the codes of blocks on a GPU, in the arithmetic of `shoal.codecs.trits`."""

from __future__ import annotations

import triton
import triton.language as tl

from shoal.codecs import draws, trits

GAMMA, FIRST, SECOND = (tl.constexpr(word) for word in (draws.GAMMA, draws.FIRST, draws.SECOND))
SMALLEST = tl.constexpr(trits.SMALLEST)
SIGN, CODE = tl.constexpr(-(2**31)), tl.constexpr(-(2**30))
TINY, HUGE = tl.constexpr(2.0**-40), tl.constexpr(2.0**50)  # squares of what is in between fit a float


@triton.jit  # type: ignore[untyped-decorator]
def as_blocks(x, TILE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile as rows, one for each block, that was read as a row for each warp, 128 elements at a time.

    So a warp has elements that follow each other, and no other has part of their words of sixteen.
    """
    return tl.reshape(tl.permute(x, (1, 0, 2)), (TILE // BLOCK, BLOCK))


@triton.jit  # type: ignore[untyped-decorator]
def as_read(x, TILE: tl.constexpr, WARP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The other way round."""
    return tl.permute(tl.reshape(x, (TILE // WARP, WARP // 128, 128)), (1, 0, 2))


@triton.jit
def drawn(word, places):  # type: ignore[no-untyped-def]
    """The draws at these places of a stream whose first word is mixed from `word`: 23 bits."""
    mixed = word.to(tl.uint64) + (places // 2).to(tl.uint64) * GAMMA
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = mixed ^ (mixed >> 31)
    half = tl.where(places % 2 == 0, mixed & 0xFFFFFFFF, mixed >> 32)
    return (half >> 9).to(tl.int32)


@triton.jit
def scale_of(u, clip, length):  # type: ignore[no-untyped-def]
    """Of each row, of which so many elements count."""
    bits = tl.max(u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # so that what is not a number is largest
    top = bits.to(tl.float32, bitcast=True)
    deviation = tl.sqrt(tl.sum(u * u, 1) / length)
    if tl.max(((top <= TINY) | (top >= HUGE)).to(tl.int32), 0) == 1:
        power = tl.minimum(tl.maximum(0x7F000000 - (bits & 0x7F800000), 0x00800000), 0x7E000000)
        part = u * power.to(tl.float32, bitcast=True)[:, None]  # about 1 or less
        deviation = (0x7F000000 - power).to(tl.float32, bitcast=True) * tl.sqrt(
            tl.sum(part * part, 1) / length
        )
    scale = tl.where(clip > 0, tl.minimum(top, clip * deviation), top)
    scale = tl.where(top >= SMALLEST, scale, 0.0)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def codes_of(u, scale, noise):  # type: ignore[no-untyped-def]
    """In the upper two bits of words: the sign, and whether an element in scales and a draw make 2.

    These words are the floats 2, 0, -0 and -2; all 0 where the scale is no number.
    """
    each = tl.where(scale > 0.0, tl.math.div_rn(1.0, scale), 0.0)[:, None]
    signed = noise | (u.to(tl.int32, bitcast=True) & SIGN)
    sums = tl.fma(u, each, signed.to(tl.float32, bitcast=True))
    return sums.to(tl.int32, bitcast=True) & tl.where(scale == scale, CODE, 0)[:, None]
