"""ChunkSelection: a few elements of every chunk, their places as bytes, and their mean over senders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.bits import bytes_of, from_bytes, to_bytes
from shoal.core.codec import expect
from shoal.core.errors import WireError
from shoal.core.parameter_chunks import ParameterChunks


@dataclass(frozen=True)
class ChunkSelection:
    """Which of a vector's chunks there are, and how many elements of each chunk travel."""

    chunks: tuple[ParameterChunks, ...]  # one entry for each parameter
    kept: tuple[int, ...]  # elements of each of its chunks

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter that travel."""
        return [each.number * k for each, k in zip(self.chunks, self.kept, strict=True)]

    def largest(self, cut: Sequence[Tensor]) -> list[Tensor]:
        """For each parameter the places of the largest elements, in absolute value, of every chunk."""
        return [
            each.abs().topk(k, dim=1).indices.sort(dim=1).values
            for each, k in zip(cut, self.kept, strict=True)
        ]

    def to_bytes(self, places: Sequence[Tensor]) -> Tensor:
        """The places, each in as few bits as its chunk allows."""
        packed = [to_bytes(each, bits) for each, bits in zip(places, self._bits, strict=True)]
        return torch.cat(packed)

    def from_bytes(self, packed: Tensor) -> list[Tensor]:
        """The places in these bytes. Raises WireError for bytes that are no such places."""
        lengths = [bytes_of(size, bits) for size, bits in zip(self.sizes, self._bits, strict=True)]
        expect((packed,), (torch.uint8, sum(lengths)))
        places = [
            from_bytes(part, bits, size).view(-1, k)
            for part, bits, size, k in zip(
                torch.split(packed, lengths), self._bits, self.sizes, self.kept, strict=True
            )
        ]
        if any(bool((p >= each.length).any()) for p, each in zip(places, self.chunks, strict=True)):
            raise WireError("a message names an element beyond the end of its chunk")
        return places

    @property
    def _bits(self) -> list[int]:
        return [max(1, (each.length - 1).bit_length()) for each in self.chunks]


class ChunkMean:
    """A weighted mean of selected elements, parameter by parameter; add in the order of ranks."""

    def __init__(self, selection: ChunkSelection, like: Tensor) -> None:
        self._sums = [like.new_zeros(each.number, each.length) for each in selection.chunks]
        self._weights = [torch.zeros_like(each) for each in self._sums]
        self._total = 0.0

    def add(self, weight: float, places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Count what one sender sent, once."""
        self._total += weight
        for n, (place, value) in enumerate(zip(places, values, strict=True)):
            self._sums[n].scatter_add_(1, place, value.view_as(place) * weight)
            self._weights[n].scatter_add_(
                1, place, torch.full_like(self._sums[n][:, : place.shape[1]], weight)
            )

    def over_senders(self) -> list[Tensor]:
        """Each element's mean over those who sent it; 0 where nobody did."""
        return [torch.where(w > 0, s / w, 0.0) for s, w in zip(self._sums, self._weights, strict=True)]

    def over_all(self) -> list[Tensor]:
        """Each element's mean over everybody, of whom some sent nothing."""
        return [s / self._total if self._total else s for s in self._sums]
