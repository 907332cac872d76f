"""Trits in one pass over memory: a block is measured while it is read, and drawn for while it is near.

Where its scale is not quite that of the lines of torch, about one trit in a million is another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.ternary_drawing import noise, write
from shoal.codecs.kernels.ternary_reading import decode
from shoal.codecs.kernels.ternary_scale import clipped, measured, scale
from shoal.core.codec import State

__all__ = ["able", "codes", "decode", "encode", "scales"]

GROUP = 256
ZERO = np.float32(0)


def able(block: int) -> bool:
    """Whether it knows blocks of that length."""
    return block % GROUP == 0


def encode(
    v: Tensor, rest: Tensor | None, clip: float, block: int, state: State, codes: Tensor, scales: Tensor
) -> None:
    """Write the codes and scales of `v`, or of `v + rest`; leave in `rest` what they lack."""
    n, whole, blocks = v.numel(), v.numel() // block * block, v.numel() // block
    (table, masks), all_scales = noise(state, block, scales.numel()), scales.numpy()
    left: Any = None if rest is None else rest.numpy()
    clip = float(clip)  # for a whole number, numba would compile it once more
    _encode(v.detach().numpy(), left, clip, block, block, table, masks, codes.numpy(), all_scales[:blocks])
    if whole < n:  # a short block is filled up with zeros
        fill = (0, block - (n - whole))
        last, more = pad(v.detach()[whole:], fill), torch.empty(block // 16, dtype=torch.int32)
        left = None if rest is None else pad(rest[whole:], fill).numpy()
        _encode(last.numpy(), left, clip, block, n - whole, table, masks[-1:], more.numpy(), all_scales[-1:])
        codes[whole // 16 :] = more[: codes.numel() - whole // 16]
        if rest is not None:
            rest.numpy()[whole:] = left[: n - whole]


def scales(u: Tensor, clip: float, block: int, length: int) -> Tensor:
    """Of the blocks of `u`, of which so many elements count and zeros follow."""
    found = torch.empty(u.numel() // block)
    _scales(u.numpy(), float(clip), block, length, found.numpy())
    return found


def codes(u: Tensor, scales: Tensor, block: int, state: State) -> Tensor:
    """Of whole blocks, on these scales."""
    drawn = torch.empty(u.numel() // 16, dtype=torch.int32)
    _codes(u.numpy(), scales.numpy(), block, *noise(state, block, scales.numel()), drawn.numpy())
    return drawn


@compiled
def _scales(u: Any, clip: float, block: int, length: int, scales: Any) -> None:
    for b in range(scales.size):
        share = clip * clip / min(block, length - b * block)
        scales[b] = _scale(u, None, share, b * block, block)


@compiled
def _codes(u: Any, scales: Any, block: int, table: Any, masks: Any, codes: Any) -> None:
    for b in range(scales.size):
        write(u, None, scales[b], b * block, block, table, masks[b], codes)


@compiled
def _scale(v: Any, rest: Any, share: float, begin: int, block: int) -> Any:
    most, total = measured(v, rest, begin, block)
    size = clipped(most, total, share)
    return scale(v if rest is None else rest, total, share, begin, block) if size < ZERO else size


@compiled
def _encode(
    v: Any, rest: Any, clip: float, block: int, length: int, table: Any, masks: Any, codes: Any, scales: Any
) -> None:
    share = clip * clip / length
    for b in range(scales.size):
        size = _scale(v, rest, share, b * block, block)
        scales[b] = size
        write(v, rest, size, b * block, block, table, masks[b], codes)
