"""Sparse vectors, and codecs that make vectors sparse (SparCML, Renggli et al. 2019)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoal.core.codec import Codec, Payload

POSITION_BYTES = 8
"""c: what a position takes in memory."""


def most_pairs(elements: int, itemsize: int) -> int:
    """delta: with more of its elements than that, a vector takes less memory as a whole.

    Pairs of a position and a value take c + s bytes, so delta = m s / (c + s), a third of m for float32.
    """
    return elements * itemsize // (POSITION_BYTES + itemsize)


@dataclass(frozen=True)
class SparseVector:
    """A vector that has `values` at `positions`, which rise, and zeros elsewhere.

    Where the positions are None, the values are all of the vector.
    """

    elements: int
    values: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(cls, elements: int, positions: Tensor, values: Tensor) -> SparseVector:
        """In pairs, or whole where that is shorter."""
        pairs = cls(elements, values, positions)
        if len(values) <= most_pairs(elements, values.element_size()):
            return pairs
        return cls(elements, pairs.into(values.new_empty(elements)))

    def __add__(self, other: SparseVector) -> SparseVector:
        """The sum. a + b and b + a have the same bits, as long as no zero among the values has a sign."""
        if self.positions is None:
            return SparseVector(self.elements, other._added_to(self.values))
        if other.positions is None:
            return SparseVector(self.elements, self._added_to(other.values))
        place = torch.searchsorted(self.positions, other.positions)
        inside = place.clamp(max=max(0, len(self.positions) - 1))
        both = self.positions[inside] == other.positions if len(self.positions) else place < 0
        values = self.values.index_add(0, place[both], other.values[both])
        alone = ~both
        return SparseVector.of(
            self.elements,
            *_woven(self.positions, values, other.positions[alone], other.values[alone], place[alone]),
        )

    def times(self, weight: float, dtype: torch.dtype) -> SparseVector:
        """The vector times a weight, in another dtype, and without zeros that have a sign or a position."""
        values = self.values.to(dtype) * weight
        if self.positions is None:
            return SparseVector(self.elements, values + 0.0)
        stays = values != 0
        return SparseVector.of(self.elements, self.positions[stays], values[stays])

    def into(self, out: Tensor) -> Tensor:
        """Write all of the vector into `out`."""
        if self.positions is None:
            return out.copy_(self.values)
        out.zero_()[self.positions] = self.values
        return out

    def _added_to(self, whole: Tensor) -> Tensor:
        if self.positions is None:
            return whole + self.values
        return whole.index_add(0, self.positions, self.values)


def joined(parts: Sequence[SparseVector]) -> SparseVector:
    """One vector out of parts of it that follow each other."""
    elements = sum(part.elements for part in parts)
    positions = [part.positions for part in parts]
    if any(where is None for where in positions):
        return SparseVector(elements, torch.cat([p.into(p.values.new_empty(p.elements)) for p in parts]))
    begins = accumulate((part.elements for part in parts), initial=0)
    moved = [where + begin for where, begin in zip(positions, begins, strict=False) if where is not None]
    return SparseVector.of(elements, torch.cat(moved), torch.cat([part.values for part in parts]))


def _woven(a: Tensor, at_a: Tensor, b: Tensor, at_b: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of two that have none in common, rising, and their values; `place` of each b among a."""
    from_b = torch.zeros(len(a) + len(b), dtype=torch.bool, device=a.device)
    from_b[place + torch.arange(len(b), device=b.device)] = True
    positions, values = a.new_empty(len(from_b)), at_a.new_empty(len(from_b))
    positions[from_b], values[from_b] = b, at_b
    from_a = ~from_b
    positions[from_a], values[from_a] = a, at_a
    return positions, values


@dataclass(frozen=True)
class SparseCodec(Codec):
    """A codec that sends few elements, and of the others that they are zero."""

    @property
    def share(self) -> float | None:
        """Which share of the elements travels; None where nobody knows beforehand."""
        return None

    @abstractmethod
    def bits(self, share: float, itemsize: int) -> float:
        """How many bits an element takes that travels, on average, if such a share of all does."""

    @abstractmethod
    def read(self, payload: Payload, elements: int, dtype: torch.dtype) -> SparseVector:
        """What a payload stands for. Raises WireError if it does not fit such a vector."""

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        return self.read(payload, out.numel(), out.dtype).into(out)


class SparseWire(SparseCodec):
    """A sparse codec that loses nothing, so that sums of sparse vectors travel by it."""

    @abstractmethod
    def write(self, vector: SparseVector) -> Payload:
        """What travels for a vector that is sparse already."""
