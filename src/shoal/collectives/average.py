"""Averages out of sums: the weight travels as one more element, so that one sum does it all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.engine.group import Group, Mean

Sum: TypeAlias = Callable[[Group, Tensor], Awaitable[None]]
"""Replaces a vector by its sum over the workers: exact but for rounding, and the same bits everywhere."""


def averaging(add_up: Sum) -> Mean:
    """The weighted average over the workers, and the total weight (zeros if that is 0), by this sum."""

    async def mean(group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        packed = pack(v, weight)
        await add_up(group, packed)
        return unpack(packed, v.dtype)

    return mean


def pack(v: Tensor, weight: float) -> Tensor:
    """What is to be summed: weight times `v`, then the weight."""
    wide = torch.promote_types(v.dtype, torch.float32)  # half precision could hold neither count nor sum
    packed = torch.empty(v.numel() + 1, dtype=wide, device=v.device)
    torch.mul(v.to(wide), weight, out=packed[:-1])
    packed[-1] = weight
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The average and the total weight that lie in a sum."""
    total = float(packed[-1])
    average = packed[:-1].div_(total) if total else packed[:-1]
    return average.to(dtype), total
