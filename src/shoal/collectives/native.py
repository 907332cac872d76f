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
    packed = torch.empty(v.numel() + 1, dtype=v.dtype, device=v.device)
    torch.mul(v, weight, out=packed[:-1])
    packed[-1] = weight
    began = node.transport.now()
    sent = await cast(AllReduces, node.transport).all_reduce(packed, node.timeout)
    node.meter.wait_seconds += node.transport.now() - began
    node.meter.bytes_sent += sent
    node.meter.bytes_received += sent
    total = float(packed[-1])
    return (packed[:-1].div_(total) if total else packed[:-1]), total
