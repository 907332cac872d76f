"""Sparse streams that turn dense when it pays (SparCML, Renggli et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.pairs import Pairs, seal_pairs
from shoal.codecs.selection import above, check_density
from shoal.codecs.wire import seal
from shoal.core.codec import Codec, Payload, State, one_of_feedback
from shoal.core.sparse import SparseCodec, SparseVector, SparseWire


@dataclass(frozen=True)
class Sparse(Pairs, SparseWire):
    """Writes down what is not zero, or the whole vector if that is shorter. Loses nothing but the sign of -0.

    This is how sums of sparse vectors travel on: in as many elements as any of them had.
    """

    code: ClassVar[int] = 8

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        elements, bits = v.numel(), 8 * v.element_size()
        if int(v.count_nonzero()) * (bits + 1) < elements * bits:  # a position takes a bit or more
            payload = seal_pairs(self.code, elements, *above(v, 0.0))
            if sum(body.nbytes for body in payload[1:]) < v.nbytes:
                return payload, state
        return seal(self.code, elements, elements, v.clone()), state

    def write(self, vector: SparseVector) -> Payload:
        if vector.positions is None:
            return self.encode(vector.values, {})[0]
        return seal_pairs(self.code, vector.elements, vector.positions, vector.values)


@dataclass(frozen=True)
class Sparsifier(SparseCodec):
    """Sends a share of the elements; their average travels whole, unless with double feedback."""

    density: float = 0.01  # the share of the elements that travels
    feedback: str = "residual"

    def __post_init__(self) -> None:
        check_density(self.density)
        one_of_feedback(self.feedback)

    @property
    def share(self) -> float:
        return self.density

    @property
    def merged(self) -> Codec:
        return self if self.feedback == "double" else Sparse()
