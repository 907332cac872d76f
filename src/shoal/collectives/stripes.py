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

from shoal.core.codec import Payload
from shoal.core.sparse_vectors import SparseCodec
from shoal.core.transport import Message
from shoal.engine.group import PRESENT, Group


def cut(length: int, parts: int) -> list[slice]:
    """Slices that divide `length` elements; they differ by at most one element."""
    ends = [length * k // parts for k in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


class Stripes:
    """Averages in stripes, at once or while the worker does something else."""

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        exchange = Striped(group, v, weight)
        await exchange.send()
        return await exchange.finish()

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average, the one with this number at every worker."""
        exchange = Striped(group, v.clone(), weight, f" {number}", key)
        await exchange.send()
        return exchange


class Striped:
    """One average on its way."""

    def __init__(self, group: Group, v: Tensor, weight: float, name: str = "", key: str = "") -> None:
        if group.coding.codec.needs_all:
            raise ValueError(f"averages in stripes add up nothing that travels, as {group.coding.codec} does")
        self._group, self._v, self._weight, self._key = group, v, weight, key
        self._stripe, self._average = f"stripe{name}", f"average{name}"
        self._counts = weight > PRESENT
        self._cuts = cut(v.numel(), group.size)
        # so that not all send to worker 0 first
        self._others = [(group.rank + k) % group.size for k in range(1, group.size)]
        self._merged: tuple[Payload, float] | None = None  # this worker's own stripe, and the total weight

    async def send(self) -> None:
        """Send every stripe to the worker that merges it."""
        for k in self._others:
            key, part = f"{self._key}stripe.{k}", self._cuts[k]
            payload = self._group.coding.encode(key, self._v[part], self._at(part), counts=self._counts)
            await self._group.send(k, Message(self._stripe, payload, count=self._weight))

    async def progress(self) -> None:
        """Merge what has come, if all has."""
        if self._merged is None and self._group.holds(self._stripe, self._others):
            self._merged = await self._merge()

    async def finish(self) -> tuple[Tensor, float]:
        """The average of all stripes, and the total weight."""
        group = self._group
        payload, total = self._merged or await self._merge()
        out = torch.empty_like(self._v)
        mine = self._cuts[group.rank]
        out[mine] = self._decode_average(payload, mine)  # lossy for all alike, or replicas drift
        for k in self._others:
            m = await group.recv(self._average, k)
            out[self._cuts[k]] = self._decode_average(m.parts, self._cuts[k])
        return out, total

    def _own(self, own: Tensor, at: int | None) -> Tensor:
        """What this worker brings to its own stripe: as it is, unless a codec makes something else of it.

        With one that makes vectors sparse it is sparse, too, or else the average would not be.
        """
        coding = self._group.coding
        if not coding.codec.for_gradients and not isinstance(coding.codec, SparseCodec):
            return own
        key = f"{self._key}stripe.{self._group.rank}"
        payload = coding.encode(key, own, at, counts=self._counts, times=0)
        return coding.decode(payload, own.numel(), at)

    def _decode_average(self, payload: Payload, part: slice) -> Tensor:
        return self._group.coding.decode(payload, part.stop - part.start, self._at(part), merged=True)

    def _at(self, part: slice) -> int | None:
        """Where a stripe begins in the model's vector, if that is what is averaged."""
        return part.start if self._v.numel() == self._group.x.numel() else None

    async def _merge(self) -> tuple[Payload, float]:
        """Average the stripe this worker merges, its own part included, and send it to all."""
        group, mine = self._group, self._cuts[self._group.rank]
        own, at = self._v[mine], self._at(mine)
        total, acc = 0.0, torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for k in range(group.size):  # rank order, so every transport rounds alike
            if k == group.rank:
                part, count = self._own(own, at), self._weight
            else:
                m = await group.recv(self._stripe, k)
                part, count = group.coding.decode(m.parts, own.numel(), at), m.count
            acc.add_(part, alpha=count)
            total += count
        average = (acc.div_(total) if total else acc).to(own.dtype)
        payload = group.coding.encode(
            f"{self._key}average", average, at, merged=True, times=len(self._others)
        )
        for k in self._others:
            await group.send(k, Message(self._average, payload))
        return payload, total


stripes = Stripes()
