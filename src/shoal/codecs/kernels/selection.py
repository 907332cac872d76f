"""Selection in one pass: what is to be added is added on the way; what is large is kept as it is met."""

from __future__ import annotations

from math import sqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.kernels.scan import BELOW_SIGN, BLOCK, scan

INFINITE = np.int32(0x7F800000)
NONE = np.empty(0, np.float32)

Push: TypeAlias = "tuple[Any, bool]"
"""Momentum, in float32, and whether it is Nesterov's."""

STILL: Push = (np.float32(0), False)


def above(u: Tensor, tau: float, add: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where |u| > tau once `add` is added, and the elements there."""
    array, added, room = u.detach().numpy(), _array(add), u.numel() // 64 + BLOCK
    least = np.float32(tau).view(np.int32) + np.int32(1)
    found, large = np.empty(room, np.int64), np.empty(room, np.float32)
    begin, count = scan(array, added, NONE, STILL, least, 0, found, large, 0)
    while begin < array.size:
        found, large = (np.concatenate([part, np.empty_like(part)]) for part in (found, large))
        begin, count = scan(array, added, NONE, STILL, least, begin, found, large, count)
    return torch.from_numpy(found[:count]), torch.from_numpy(large[:count])


def largest(
    u: Tensor, k: int, add: Tensor | None, some: Tensor, velocity: Tensor | None = None, push: Push = STILL
) -> tuple[Tensor, Tensor]:
    """Where the k largest |u| are once `add` is added, and they; `some` magnitudes give a first guess.

    With a velocity, `add` is what changes it: see `shoal.codecs.momentum`.
    """
    array, added, room = u.detach().numpy(), _array(add), min(2 * k, u.numel()) + 2 * BLOCK
    least = _guess(some, k, u.numel())
    moving = _array(velocity)
    found, large = np.empty(room, np.int64), np.empty(room, np.float32)
    begin, count = scan(array, added, moving, push, least, 0, found, large, 0)
    while begin < array.size or (count < k and least > 1):
        if begin < array.size:  # too many: look on for what is larger than the k largest so far
            least = _cut(found[:count], large[:count], k) + np.int32(1)
            begin, count = scan(array, added, moving, push, least, begin, found, large, k)
        else:  # too few: the guess was wrong
            least, added, moving = np.int32(1), NONE, NONE
            begin, count = scan(array, added, moving, push, least, 0, found, large, 0)
    if count > k:
        _cut(found[:count], large[:count], k)
        count = k
    return torch.from_numpy(found[:count]), torch.from_numpy(large[:count])


def _array(add: Tensor | None) -> Any:
    return NONE if add is None else add.detach().numpy()


def _guess(some: Tensor, k: int, elements: int) -> Any:
    """Bits of a magnitude that hardly fewer than k of all elements have."""
    expected = k * some.numel() / elements
    rank = int(expected + 4 * sqrt(expected) + 4)
    bits = int(some.topk(rank).values[-1:].view(torch.int32)) if rank < some.numel() else 1
    return np.int32(min(max(1, bits), int(INFINITE)))


def _cut(found: Any, large: Any, k: int) -> Any:
    """Move the k largest to the front; the bits of the least of them."""
    bits = np.minimum(large.view(np.int32) & BELOW_SIGN, INFINITE)
    edge = np.partition(bits, -k)[-k]
    chosen = bits > edge
    chosen[np.flatnonzero(bits == edge)[: k - np.count_nonzero(chosen)]] = True
    found[:k], large[:k] = found[chosen], large[chosen]
    return edge
