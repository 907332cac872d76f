"""1-bit SGD on a CPU, in one pass: a column is summed while it is read, and corrected while it is in cache.

Sums are in float32, those of the PyTorch code in float64: where sums are not exact, last digits differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs import lanes
from shoal.kernels.dispatch import compiled

GROUP, LANES, SIGN = 512, 16, np.int32(-(2**31))
ZERO, ONE, NONE, FIRST = np.float32(0), np.float32(1), np.int32(0), np.int32(1)


def able(column: int) -> bool:
    """Whether the kernel takes columns of that length."""
    return column % GROUP == 0


def encode(v: Tensor, rest: Tensor | None, column: int, signs: Tensor, values: Tensor) -> None:
    """Write the signs and means of `v`, or of `v + rest`; `rest` becomes the compression error."""
    n, whole = v.numel(), v.numel() // column * column
    left: Any = None if rest is None else rest.numpy()
    _encode(v.detach().numpy(), left, column, column, signs.numpy(), values.numpy()[: 2 * whole // column])
    if whole < n:  # a short column is padded with -0, which is negative and adds nothing
        fill = 0, column - (n - whole)
        last, more = pad(v.detach()[whole:], fill, value=-0.0), torch.empty(column // 32, dtype=torch.int32)
        left = None if rest is None else pad(rest[whole:], fill, value=-0.0).numpy()
        _encode(last.numpy(), left, column, n - whole, more.numpy(), values.numpy()[-2:])
        signs[whole // 32 :] = more[: signs.numel() - whole // 32]
        if rest is not None:
            rest.numpy()[whole:] = left[: n - whole]


def decode(signs: Tensor, values: Tensor, column: int, out: Tensor) -> None:
    """Decode into `out`."""
    n, whole = out.numel(), out.numel() // column * column
    _decode(signs.numpy(), values.numpy()[: 2 * whole // column], column, out.numpy())
    if whole < n:
        last, more = torch.empty(column), pad(signs[whole // 32 :], (0, column // 32))
        _decode(more.numpy(), values.numpy()[-2:], column, last.numpy())
        out[whole:] = last[: n - whole]


@compiled
def _encode(v: Any, rest: Any, column: int, length: int, signs: Any, values: Any) -> None:
    for c in range(values.size // 2):
        low, high = _means(v, rest, c * column, column, length, signs)
        values[2 * c], values[2 * c + 1] = low, high
        if rest is not None:
            below, above = lanes.splat(low), lanes.splat(high)
            for i in range(c * column, (c + 1) * column, LANES):
                u = lanes.load(rest, i)
                lanes.store(rest, i, lanes.sub(u, lanes.where_below(lanes.bits(u), below, above)))


@compiled
def _means(v: Any, rest: Any, begin: int, column: int, length: int, signs: Any) -> Any:
    zero = lanes.splat(ZERO)
    low, high, few = zero, zero, length - column  # padding does not count
    for group in range(begin, begin + column, GROUP):
        below = lanes.splat_word(NONE)
        for i in range(group, group + GROUP, 2 * LANES):  # two rows, so that the CPU loads both first
            u, w = lanes.load(v, i), lanes.load(v, i + LANES)
            if rest is not None:
                u, w = lanes.add(u, lanes.load(rest, i)), lanes.add(w, lanes.load(rest, i + LANES))
                lanes.store(rest, i, u)
                lanes.store(rest, i + LANES, w)
            low = lanes.add(lanes.add(low, lanes.lesser(u, zero)), lanes.lesser(w, zero))
            high = lanes.add(lanes.add(high, lanes.greater(u, zero)), lanes.greater(w, zero))
            below = _behind(lanes.fixed(_behind(below, u)), w)
        lanes.store_words(signs, group // 32, lanes.flip(below))
        few += lanes.sum_words(lanes.ones(below))
    down, up = max(np.float32(few), ONE), max(np.float32(length - few), ONE)
    low_mean, high_mean = lanes.total(low) / down, lanes.total(high) / up
    if np.isfinite(low_mean) and np.isfinite(high_mean):
        return low_mean, high_mean
    return _wide_means((v if rest is None else rest)[begin : begin + column], down, up)


@compiled
def _wide_means(u: Any, down: Any, up: Any) -> Any:
    """The means of so many elements below 0 and above, where a sum is not a finite float32."""
    low = high = np.float64(0)
    for i in range(u.size):
        if np.signbit(u[i]):
            low += u[i]
        else:
            high += u[i]
    return np.float32(low / down), np.float32(high / up)


@compiled
def _behind(signs: Any, u: Any) -> Any:
    sign, one = lanes.splat_word(SIGN), lanes.splat_word(FIRST)
    return lanes.either(lanes.both(lanes.bits(u), sign), lanes.down(signs, one))


@compiled
def _decode(signs: Any, values: Any, column: int, out: Any) -> None:
    for c in range(values.size // 2):
        low, high = lanes.splat(values[2 * c]), lanes.splat(values[2 * c + 1])
        for group in range(c * column, (c + 1) * column, GROUP):
            words = lanes.load_words(signs, group // 32)
            for row in range(32):
                mine = lanes.splat_word(np.int32(np.uint32(1) << np.uint32(row)))
                lanes.store(out, group + LANES * row, lanes.where_any(lanes.both(words, mine), high, low))
