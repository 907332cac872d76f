"""Averaging in stripes: every worker is the merger of one part of the vector.

The vector is cut into P stripes; everyone sends stripe k to worker k, which averages it and sends the
result back. Each worker sends 2 (P-1)/P n bytes in 2 (P-1) messages, in two rounds of latency, so with
latency L and G seconds a byte an uncontended exchange takes 2 L + 2 n G (P-1)/P.
Any codec fits, since stripes are decoded before they are added; and all workers get the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shoal.core.node import Node
from shoal.core.transport import Message


def cut(length: int, parts: int) -> list[slice]:
    """Slices that divide `length` elements; they differ by at most one element."""
    ends = [length * k // parts for k in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


async def stripes(node: Node, v: Tensor, weight: float) -> tuple[Tensor, float]:
    """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
    cuts = cut(v.numel(), node.size)
    others = [
        (node.rank + k) % node.size for k in range(1, node.size)
    ]  # so that not all send to worker 0 first
    for k in others:
        await node.send(k, Message("stripe", node.encode(f"stripe.{k}", v[cuts[k]]), count=weight))
    average, total = await _merge(node, v[cuts[node.rank]], weight)
    payload = node.encode("average", average)
    for k in others:
        await node.send(k, Message("average", payload))
    out = torch.empty_like(v)
    out[cuts[node.rank]] = node.decode(
        payload, average.numel()
    )  # lossy for all alike, or replicas drift apart
    for k in others:
        m = await node.recv("average", src=k)
        out[cuts[k]] = node.decode(m.parts, cuts[k].stop - cuts[k].start)
    return out, total


async def _merge(node: Node, own: Tensor, weight: float) -> tuple[Tensor, float]:
    """Average the stripe this worker merges, its own part included."""
    total, acc = 0.0, torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    for k in range(node.size):  # rank order, so every transport rounds alike
        if k == node.rank:
            part, count = own, weight
        else:
            m = await node.recv("stripe", src=k)
            part, count = node.decode(m.parts, own.numel()), m.count
        acc.add_(part, alpha=count)
        total += count
    return (acc.div_(total) if total else acc).to(own.dtype), total
