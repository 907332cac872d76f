"""Weighted averages from sums: the weight is one more element of the vector, so one sum is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.engine.group import Group, Mean

Sum: TypeAlias = Callable[[Group, Tensor], Awaitable[None]]
"""Sums a vector over the workers, in place: exact up to rounding, with the same bits at every worker."""


def averaging(add_up: Sum) -> Mean:
    """Make a collective from `add_up`: it returns the weighted average and the total weight (zeros if 0)."""

    async def mean(group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        packed = pack(v, weight)
        await add_up(group, packed)
        return unpack(packed, v.dtype)

    return mean


def pack(v: Tensor, weight: float) -> Tensor:
    """The vector to sum: `v` times the weight, then the weight itself."""
    wide = torch.promote_types(v.dtype, torch.float32)  # half precision could hold neither weight nor sum
    packed = torch.empty(v.numel() + 1, dtype=wide, device=v.device)
    torch.mul(v.to(wide), weight, out=packed[:-1])
    packed[-1] = weight
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The average and the total weight from a sum of packed vectors."""
    total = float(packed[-1])
    average = packed[:-1].div_(total) if total else packed[:-1]
    return average.to(dtype), total
