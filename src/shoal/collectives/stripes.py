"""Averaging in stripes: every worker averages one part of the vector (direct reduce-scatter and all-gather).

The vector is cut into P stripes. Every worker sends stripe k to worker k, which averages it and sends the
result back. Each worker sends 2 (P-1)/P n bytes in 2 (P-1) messages, in two rounds of latency, so with
latency L and G seconds a byte an uncontended exchange takes 2 L + 2 n G (P-1)/P.
Almost any codec fits, since stripes are decoded before they are added. All workers get the same bits.
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
    """Slices that divide `length` elements; their lengths differ by at most one."""
    ends = [length * k // parts for k in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


class Stripes:
    """Averages in stripes, at once or in the background."""

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        exchange = Striped(group, v, weight)
        await exchange.send()
        return await exchange.finish()

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average in the background. Every worker must give it the same number."""
        exchange = Striped(group, v.clone(), weight, f" {number}", key)
        await exchange.send()
        return exchange


class Striped:
    """One average in progress. Raises ValueError for a codec that needs all workers at once."""

    def __init__(self, group: Group, v: Tensor, weight: float, name: str = "", key: str = "") -> None:
        if group.coding.codec.needs_all:
            raise ValueError(
                f"{group.coding.codec} needs all workers at once, and each stripe is averaged at one worker"
            )
        self._group, self._v, self._weight, self._key = group, v, weight, key
        self._stripe, self._average = f"stripe{name}", f"average{name}"
        self._is_begun = bool(name)  # to be finished later
        self._counts = weight > PRESENT
        self._cuts = cut(v.numel(), group.size)
        # the next worker first, so that not all send to worker 0 at once
        self._others = [(group.rank + k) % group.size for k in range(1, group.size)]
        self._merged: tuple[Payload, float] | None = None  # this worker's own stripe, and the total weight

    async def send(self) -> None:
        """Send every stripe to the worker that merges it."""
        for k in self._others:
            key, part = f"{self._key}stripe.{k}", self._cuts[k]
            payload = self._encode(key, self._v[part], self._at(part))
            await self._group.send(k, Message(self._stripe, payload, count=self._weight))

    async def progress(self) -> None:
        """Merge this worker's stripe if it has arrived from all others; never waits for it."""
        if self._merged is None and self._group.holds(self._stripe, self._others):
            self._merged = await self._merge()

    async def finish(self) -> tuple[Tensor, float]:
        """Wait for the averages of all stripes. Returns the average and the total weight."""
        group = self._group
        payload, total = self._merged or await self._merge()
        out = torch.empty_like(self._v)
        mine = self._cuts[group.rank]
        out[mine] = self._decode_average(payload, mine)  # lossy here too, or replicas would drift apart
        for k in self._others:
            m = await group.recv(self._average, k)
            out[self._cuts[k]] = self._decode_average(m.parts, self._cuts[k])
        if self._is_begun:
            keys = ("average", *(f"stripe.{k}" for k in range(group.size)))
            group.coding.complete(f"{self._key}{name}" for name in keys)
        return out, total

    def _encode(self, key: str, v: Tensor, at: int | None, times: int = 1) -> Payload:
        """A part of this worker's vector."""
        coding = self._group.coding
        return coding.encode(key, v, at, counts=self._counts, times=times, under_way=self._is_begun)

    def _own(self, own: Tensor, at: int | None) -> Tensor:
        """This worker's contribution to its own stripe: uncompressed, unless the codec changes gradients.

        A sparse codec applies here, too: otherwise the average would be dense.
        """
        coding = self._group.coding
        if not coding.codec.for_gradients and not isinstance(coding.codec, SparseCodec):
            return own
        key = f"{self._key}stripe.{self._group.rank}"
        payload = self._encode(key, own, at, times=0)
        return coding.decode(payload, own.numel(), at)

    def _decode_average(self, payload: Payload, part: slice) -> Tensor:
        return self._group.coding.decode(payload, part.stop - part.start, self._at(part), merged=True)

    def _at(self, part: slice) -> int | None:
        """Where a stripe begins in the model's vector; None if a vector of another length is averaged."""
        return part.start if self._v.numel() == self._group.x.numel() else None

    async def _merge(self) -> tuple[Payload, float]:
        """Average this worker's stripe, its own part included, and send it to all others."""
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
            f"{self._key}average",
            average,
            at,
            merged=True,
            counts=total > 0,
            times=len(self._others),
            under_way=self._is_begun,
        )
        for k in self._others:
            await group.send(k, Message(self._average, payload))
        return payload, total


stripes = Stripes()
