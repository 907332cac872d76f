"""The largest elements: few travel, the others wait until they have grown (Aji & Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.pairs import seal_pairs, unseal_pairs
from shoal.codecs.selection import check_density, how_many, largest
from shoal.codecs.sparse import Sparse
from shoal.core.codec import Codec, Payload, State, one_of_feedback


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the largest magnitudes, exactly, and nothing of the others. With density 1 nothing is lost.

    At least one travels; of equal ones those that come first; zeros never. What is not a number counts as
    infinite. With double feedback the average is cut down to as few again.
    """

    code: ClassVar[int] = 9

    density: float = 0.01  # the share of the elements that travels
    feedback: str = "residual"

    def __post_init__(self) -> None:
        check_density(self.density)
        one_of_feedback(self.feedback)

    @property
    def merged(self) -> Codec:
        return self if self.feedback == "double" else Sparse()

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(v, how_many(self.density, v.numel()))
        return seal_pairs(self.code, v.numel(), positions, values), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        positions, values = largest(rest, how_many(self.density, v.numel()), add=v)
        rest.index_fill_(0, positions, 0)
        return seal_pairs(self.code, v.numel(), positions, values), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        return unseal_pairs(payload, self.code, out)
