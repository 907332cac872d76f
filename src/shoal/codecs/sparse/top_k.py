"""Top-k sparsification: sends the largest elements; the others wait in the residual (Aji & Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.sparse.codec import Pairs, Sparsifier, seal_pairs
from shoal.codecs.sparse.selection import how_many, largest
from shoal.core.codec import Payload, State


@dataclass(frozen=True)
class TopK(Pairs, Sparsifier):
    """Sends the elements of largest magnitude, exactly, and no others. With density 1 nothing is lost.

    Sends at least one; of equal elements those that come first; zeros never. NaN counts as infinite. With
    double feedback, the average is cut down to as few elements again.
    """

    code: ClassVar[int] = 9

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(v, how_many(self.density, v.numel()))
        return seal_pairs(self.code, v.numel(), positions, values), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(rest, how_many(self.density, v.numel()), add=v)
        rest.index_fill_(0, positions, 0)
        return seal_pairs(self.code, v.numel(), positions, values), state
