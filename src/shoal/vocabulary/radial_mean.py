"""RadialMean: a mean of displacements that is as long as they are (radial-directional averaging)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.vector import Piece
from shoal.vocabulary.node import Node


@dataclass(frozen=True)
class TensorPlace:
    """Where a parameter, or the part of it that is there, lies in a fragment of the model."""

    place: slice
    is_radial: bool  # else its weighted mean is taken


def tensors_of(fragment: Sequence[slice], pieces: Sequence[Piece], radial: bool) -> list[TensorPlace]:
    """The parameters in a fragment, whose slices lie end to end; embeddings are never radial."""
    found, begins = [], 0
    for part in fragment:
        for piece in pieces:
            first, last = max(part.start, piece.begin), min(part.stop, piece.end)
            if first < last:
                place = slice(begins + first - part.start, begins + last - part.start)
                found.append(TensorPlace(place, radial and not piece.is_embedding))
        begins += part.stop - part.start
    return found


class RadialMean:
    """Displacements that a server adds up, tensor by tensor: mean length times unit mean direction.

    The mean of N displacements that have nothing in common is √N times shorter than they are; this one is
    not. `most` is the largest number of tensors that a displacement may have.
    """

    def __init__(self, s: Node, most: int) -> None:
        wide = torch.promote_types(s.x.dtype, torch.float32)  # a sum in half precision overflows
        self._sum = s.keep("sum", torch.zeros_like(s.x, dtype=wide), shared=True)
        self._directions = s.keep("directions", torch.zeros_like(s.x, dtype=wide), shared=True)
        lengths = torch.zeros(1, 1 + most, dtype=torch.float64)
        self._lengths = s.keep("lengths", lengths, shared=True)[0]  # all weights, and w |d| of each tensor

    def add(self, d: Tensor, weight: float, tensors: Sequence[TensorPlace]) -> None:
        """Take in a displacement of these tensors."""
        self._sum[: d.numel()].add_(d, alpha=weight)
        self._lengths[0] += weight
        for n, tensor in enumerate(tensors, start=1):
            own = d[tensor.place]
            length = float(own.norm()) if tensor.is_radial else 0.0
            if length > 0:  # one of length 0 points nowhere
                self._directions[tensor.place].add_(own, alpha=weight / length)
                self._lengths[n] += weight * length

    def take(self, tensors: Sequence[TensorPlace], out: Tensor) -> Tensor:
        """Write the mean to `out`, and begin another. Displacements that cancel out have their plain mean."""
        total = float(self._lengths[0])
        out.copy_(self._sum[: out.numel()] / total if total else self._sum[: out.numel()])
        for n, tensor in enumerate(tensors, start=1):
            direction = self._directions[tensor.place]
            length = float(direction.norm()) if tensor.is_radial else 0.0
            if length > 0:
                out[tensor.place] = direction * (float(self._lengths[n]) / total / length)
        for memory in (self._sum, self._directions, self._lengths):
            memory.zero_()
        return out
