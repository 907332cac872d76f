"""The pass over a vector that finds its large elements.

Without their signs, the bits of floats are in the order of the floats, those of what is not a number above
all; and whole numbers are compared several at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs.kernels.compiler import compiled

BLOCK = 4096  # elements that stay near the processor from the sum to the last look
BELOW_SIGN = np.int32(0x7FFFFFFF)


@compiled
def scan(
    u: Any, added: Any, velocity: Any, push: Any, least: Any, begin: int, found: Any, large: Any, count: int
) -> Any:
    """Add `added` to `u` where it is not empty; append where `u` has at least these bits, and its elements.

    Where `velocity` is not empty either, what is added is that: `push` says how it goes on. From element
    `begin` on, to the end or until `found` might not hold one block more. Returns where that was, and how
    many are found.
    """
    bits = u.view(np.int32)
    marks = np.zeros(BLOCK, np.uint8)
    while begin < u.size and count + BLOCK <= found.size:
        end = min(begin + BLOCK, u.size)
        if velocity.size:
            _push(u[begin:end], added[begin:end], velocity[begin:end], push)
        elif added.size:
            _add(u[begin:end], added[begin:end])
        marks[end - begin :] = 0
        _mark(bits[begin:end], least, marks)
        count = _collect(u[begin:end], marks, begin, found, large, count)
        begin = end
    return begin, count


@compiled
def _add(u: Any, added: Any) -> None:
    for i in range(u.size):
        u[i] += added[i]


@compiled
def _push(u: Any, g: Any, velocity: Any, push: Any) -> None:
    momentum, nesterov = push
    if nesterov:
        for i in range(u.size):
            velocity[i] = (velocity[i] + g[i]) * momentum
            u[i] = (u[i] + velocity[i]) + g[i]
    else:
        for i in range(u.size):
            velocity[i] = velocity[i] * momentum + g[i]
            u[i] += velocity[i]


@compiled
def _mark(bits: Any, least: Any, marks: Any) -> None:
    for i in range(bits.size):
        marks[i] = (bits[i] & BELOW_SIGN) >= least


@compiled
def _collect(u: Any, marks: Any, begin: int, found: Any, large: Any, count: int) -> int:
    eights = marks.view(np.uint64)  # most of them are 0
    for eight in range((u.size + 7) // 8):
        if eights[eight]:
            for i in range(8 * eight, min(8 * eight + 8, u.size)):
                found[count] = begin + i
                large[count] = u[i]
                count += marks[i]
    return count
