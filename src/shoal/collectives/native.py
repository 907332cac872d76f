"""Averaging by the transport's own all-reduce: exact only, and the order of its sums is its own."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shoal.core.node import Node
from shoal.core.transport import AllReduces


async def native(node: Node, v: Tensor, weight: float) -> tuple[Tensor, float]:
    """The weighted average of `v` over the workers, and the total weight (zeros if that is 0).

    The weight travels as one more element, so that one all-reduce does it all.
    """
    wide = torch.promote_types(v.dtype, torch.float32)  # half precision could hold neither count nor sum
    packed = torch.empty(v.numel() + 1, dtype=wide, device=v.device)
    torch.mul(v.to(wide), weight, out=packed[:-1])
    packed[-1] = weight
    began = node.transport.now()
    sent = await cast(AllReduces, node.transport).all_reduce(packed, node.timeout)
    node.meter.wait_seconds += node.transport.now() - began
    node.meter.bytes_sent += sent
    node.meter.bytes_received += sent
    total = float(packed[-1])
    average = packed[:-1].div_(total) if total else packed[:-1]
    return average.to(v.dtype), total
