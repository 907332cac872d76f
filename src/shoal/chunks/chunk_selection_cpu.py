"""The update and selection of `chunk_selection.py` on a CPU, in one pass: a chunk stays in cache.

Without the sign bit, floats are in the order of their bits, NaN above all; and integers are compared several
at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.parameter_chunks import ParameterChunks
from shoal.kernels.dispatch import compiled

BELOW_SIGN = np.int32(0x7FFFFFFF)
NEARBY = 1 << 21  # in bits of a float, up to a quarter: neighbouring chunks need about the same magnitudes


def update(each: ParameterChunks, k: int, error: Tensor, decay: float, start: Tensor, x: Tensor) -> Tensor:
    """error ← decay error + start - x for one parameter; the places of the largest k of each chunk."""
    places = torch.empty(each.number, k, dtype=torch.int64)
    e, s, y = (vector.detach().numpy()[each.begin : each.end] for vector in (error, start, x))
    _update(e, s, y, np.float32(decay), each.columns, each.height, each.width, places.numpy())
    return places


@compiled
def _update(
    error: Any, start: Any, x: Any, decay: Any, columns: int, height: int, width: int, places: Any
) -> None:
    across, guess = columns // width, 0
    sizes, large = np.empty(height * width, np.int32), np.empty(height * width, np.int32)
    found = np.empty(height * width, np.int64)
    for chunk in range(places.shape[0]):
        corner = chunk // across * height * columns + chunk % across * width
        for row in range(height):
            at = corner + row * columns
            size = sizes[row * width : (row + 1) * width]
            _add(error[at : at + width], start[at : at + width], x[at : at + width], decay, size)
        guess = max(0, _largest(sizes, guess, found, large, places[chunk]) - NEARBY)


@compiled
def _add(error: Any, start: Any, x: Any, decay: Any, sizes: Any) -> None:
    for i in range(error.size):
        total = np.float32(error[i] * decay + (start[i] - x[i]))
        error[i] = total
        sizes[i] = np.float32(total).view(np.int32) & BELOW_SIGN


@compiled
def _largest(sizes: Any, guess: int, found: Any, large: Any, places: Any) -> int:
    """Write where the largest sizes are, the first of equal ones; return the least of them."""
    count = _seek(sizes, np.int32(guess), found, large)
    if count < places.size:  # the guess was too high
        count = _seek(sizes, np.int32(0), found, large)
    edge = _edge(large[:count], places.size)
    left, n = places.size - _count(large[:count], np.int32(edge + 1)), 0
    for i in range(count):
        if large[i] == edge:
            left -= 1
        if large[i] > edge or (large[i] == edge and left >= 0):
            places[n] = found[i]
            n += 1
    return edge


@compiled
def _seek(sizes: Any, least: Any, found: Any, large: Any) -> int:
    """Collect the sizes from `least` on, and where they are."""
    count = 0
    for i in range(sizes.size):  # no branch that the CPU mispredicts
        found[count] = i
        large[count] = sizes[i]
        count += sizes[i] >= least
    return count


@compiled
def _edge(large: Any, k: int) -> int:
    """The k-th largest, by bisection."""
    low, high = 0, 1 << 31
    while high - low > 1:
        middle = (low + high) // 2
        if _count(large, np.int32(middle)) >= k:
            low = middle
        else:
            high = middle
    return low


@compiled
def _count(large: Any, least: Any) -> int:
    count = 0
    for i in range(large.size):
        count += large[i] >= least
    return count
