"""Sums of sparse vectors by recursive doubling (SparCML, Renggli et al. 2019).

The elements that each worker's codec has selected are summed as in a butterfly: in every round, neighbours on
a hypercube swap the positions and values of their partial sums, so that after round j groups of 2^j workers
hold the same sum. Sums are exact up to rounding and travel in full precision: only the codec's selection is
lossy. A sum has all elements that any of its vectors had. It becomes dense, in memory and on the wire, when
that is shorter.

The vector is encoded in the stripes of `shoal.collectives.stripes`, each with its own state. So both
algorithms send the same elements, and a run may switch from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives.butterfly import swap
from shoal.collectives.stripes import Striped, cut, stripes
from shoal.core.codec import Payload
from shoal.core.sparse_vectors import SparseCodec, SparseVector, SparseWire, joined
from shoal.core.transport import Message
from shoal.engine.group import PRESENT, Group


@dataclass(frozen=True)
class Weighted:
    """A weighted sum of vectors, and the sum of the weights."""

    vector: SparseVector
    weight: float

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.vector + other.vector, self.weight + other.weight)

    def mean(self, dtype: torch.dtype) -> Tensor:
        """The average as a dense vector; zeros if the weight is 0."""
        vector, values = self.vector, self.vector.values
        average = (values / self.weight if self.weight else torch.zeros_like(values)).to(dtype)
        if vector.positions is None:
            return average
        return SparseVector(vector.elements, average, vector.positions).into(
            average.new_empty(vector.elements)
        )


class SparseDoubling:
    """Averages the sparse vectors that a codec selects. `wire` encodes the partial sums."""

    def __init__(self, wire: SparseWire) -> None:
        self._wire = wire

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        trip = _Trip(group, self._wire, Weighted(_chosen(group, v, weight), weight))
        await swap(group, trip)
        began = group.now()
        average = trip.held.mean(v.dtype)
        group.meter.decode_seconds += group.now() - began
        group.coding.weigh(group.coding.averaging(v.nbytes), trip.sent)
        return average, trip.held.weight

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average in the background: in stripes, because the rounds of doubling block."""
        return await stripes.start(group, v, weight, number, key)


def _chosen(group: Group, v: Tensor, weight: float) -> SparseVector:
    """The elements of `v` that the codec selects, times the weight."""
    wide = torch.promote_types(v.dtype, torch.float32)  # half precision could not hold the sum
    parts = []
    for k, part in enumerate(cut(v.numel(), group.size)):
        at = part.start if v.numel() == group.x.numel() else None
        payload = group.coding.encode(f"stripe.{k}", v[part], at, counts=weight > PRESENT, times=0)
        parts.append(_read(group, payload, part.stop - part.start, at).times(weight, wide))
    return joined(parts)


def _read(group: Group, payload: Payload, numel: int, at: int | None) -> SparseVector:
    """The sparse vector in a payload of this worker's own codec."""
    began = group.now()
    codec = group.coding.fitted(at, numel)
    if not isinstance(codec, SparseCodec):
        raise TypeError(f"{codec} is not a sparse codec")
    vector = codec.read(tuple(part.to(group.x.device) for part in payload), numel, group.x.dtype)
    group.meter.decode_seconds += group.now() - began
    return vector


class _Trip:
    """A load: the partial sum that this worker holds, and the bytes that it has sent."""

    def __init__(self, group: Group, wire: SparseWire, own: Weighted) -> None:
        self.held = own
        self.sent = 0
        self._group = group
        self._wire = wire

    async def give(self, dst: int, tag: str) -> None:
        """Send the partial sum in its shortest form."""
        group, began = self._group, self._group.now()
        payload = self._wire.write(self.held.vector)
        group.meter.encode_seconds += group.now() - began
        self.sent += sum(part.nbytes for part in payload)
        await group.send(dst, Message(tag, payload, count=self.held.weight))

    async def add(self, src: int, tag: str) -> None:
        """Add the partial sum that arrives."""
        taken = await self._take(src, tag)
        began = self._group.now()
        self.held += taken  # both partners get the same bits: a + b equals b + a
        self._group.meter.decode_seconds += self._group.now() - began

    async def replace(self, src: int, tag: str) -> None:
        """Replace the partial sum by the one that arrives."""
        self.held = await self._take(src, tag)

    async def _take(self, src: int, tag: str) -> Weighted:
        """Wait for the partial sum of `src`. Raises PeerLost as soon as any worker is lost."""
        group, own = self._group, self.held.vector
        m = await group.take(tag, src)
        began = group.now()
        here = tuple(part.to(own.values.device) for part in m.parts)
        vector = self._wire.read(here, own.elements, own.values.dtype)
        group.meter.decode_seconds += group.now() - began
        return Weighted(vector, m.count)
