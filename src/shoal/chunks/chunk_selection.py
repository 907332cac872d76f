"""ChunkSelection: a few elements of every chunk, their places as bytes, and their mean over senders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from shoal.chunks.bits import bytes_of, from_bytes, to_bytes
from shoal.core.codec import expect
from shoal.core.errors import WireError
from shoal.core.parameter_chunks import ParameterChunks
from shoal.kernels.dispatch import MANY, on_cpu, on_gpu

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a float of so many bytes


@dataclass(frozen=True)
class ChunkSelection:
    """Which of a vector's chunks there are, and how many elements of each chunk travel."""

    chunks: tuple[ParameterChunks, ...]  # one entry for each parameter
    kept: tuple[int, ...]  # elements of each of its chunks

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter that travel."""
        return [each.number * k for each, k in zip(self.chunks, self.kept, strict=True)]

    def update(self, error: Tensor, decay: float, start: Tensor, x: Tensor) -> list[Tensor]:
        """error ← decay error + start - x; for each parameter the places of its largest elements."""
        if (kernel := self._kernel(error, start, x)) is not None:
            pairs = zip(self.chunks, self.kept, strict=True)
            return [kernel.update(each, k, error, decay, start, x) for each, k in pairs]
        error.mul_(decay).add_(start - x)
        return self.largest([each.cut(error) for each in self.chunks])

    def largest(self, cut: Sequence[Tensor]) -> list[Tensor]:
        """For each parameter the places of the largest elements, in absolute value, of every chunk."""
        return [largest_places(each, k) for each, k in zip(cut, self.kept, strict=True)]

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

    def _kernel(self, *vectors: Tensor) -> ModuleType | None:
        """The kernels that take these vectors, if any; all compute the same bits."""
        if on_gpu(*vectors):
            from shoal.chunks import chunk_selection_gpu

            return chunk_selection_gpu if all(map(chunk_selection_gpu.able, self.chunks)) else None
        if vectors[0].numel() >= MANY and on_cpu(*vectors):
            from shoal.chunks import chunk_selection_cpu

            return chunk_selection_cpu
        return None


def largest_places(chunks: Tensor, k: int) -> Tensor:
    """The rising places of the k largest |elements| of each row; of equal ones, the first. NaN is largest."""
    sizes = chunks.abs().view(INTEGERS[chunks.element_size()])  # without a sign, in the order of floats
    edge = sizes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = sizes >= edge
    if int(chosen.sum()) > k * len(sizes):
        above, ties = sizes > edge, sizes == edge
        chosen = above | (ties & (ties.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(-1, k)


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
