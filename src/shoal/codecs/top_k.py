"""The largest elements: few travel, the others wait until they have grown (Aji & Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.pairs import Pairs, seal_pairs
from shoal.codecs.selection import how_many, largest
from shoal.codecs.sparse import Sparsifier
from shoal.core.codec import Payload, State


@dataclass(frozen=True)
class TopK(Pairs, Sparsifier):
    """Sends the largest magnitudes, exactly, and nothing of the others. With density 1 nothing is lost.

    At least one travels; of equal ones those that come first; zeros never. What is not a number counts as
    infinite. With double feedback the average is cut down to as few again.
    """

    code: ClassVar[int] = 9

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(v, how_many(self.density, v.numel()))
        return seal_pairs(self.code, v.numel(), positions, values), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(rest, how_many(self.density, v.numel()), add=v)
        rest.index_fill_(0, positions, 0)
        return seal_pairs(self.code, v.numel(), positions, values), state
