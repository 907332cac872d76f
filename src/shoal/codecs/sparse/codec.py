"""Sparse vectors on the wire: positions and values, or dense if shorter (SparCML, Renggli et al. 2019).

The header's count is the number of values. If that is the whole vector there is one body, the vector.
Otherwise there are two: the positions in the code of `gaps.py`, and the values in the vector's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.sparse import gaps
from shoal.codecs.sparse.selection import above
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_density, one_of_feedback
from shoal.core.sparse_vectors import SparseCodec, SparseVector, SparseWire

MANY = 1 << 40  # elements: enough that any share of them is close to a whole number


def seal_pairs(code: int, elements: int, positions: Tensor, values: Tensor) -> Payload:
    """The payload of these values at these rising positions."""
    if values.numel() == elements:
        return seal(code, elements, elements, values)
    return seal(code, elements, values.numel(), gaps.pack(positions, elements), values)


def unseal_pairs(payload: Payload, code: int, elements: int, dtype: torch.dtype) -> SparseVector:
    """The vector in a payload of `seal_pairs`; raises WireError for any other payload."""
    count, bodies = unseal(payload, code, elements)
    if count == elements:
        (values,) = expect(bodies, (dtype, count))
        return SparseVector(elements, values.flatten())
    stream, values = two(bodies)
    expect((values,), (dtype, count))
    positions, _ = gaps.unpack(stream, count, elements)
    return SparseVector(elements, values.flatten(), positions)


def position_bits(share: float) -> float:
    """The bits of a position on average, if each element is sent with probability p.

    A gap of g has probability p (1 - p)^g, so the mean of q is r / (1 - r) with r = (1 - p)^(2^k).
    """
    k = gaps.low_bits(max(1, round(share * MANY)), MANY)
    return k + 1 / (1 - (1 - share) ** (1 << k)) if share else 0.0


def two(bodies: Payload) -> tuple[Tensor, Tensor]:
    """The two bodies; raises WireError for another number of them."""
    if len(bodies) != 2:
        raise WireError(f"a payload of {len(bodies)} bodies arrived where 2 were expected")
    return bodies[0], bodies[1]


class Pairs(SparseCodec):
    """A codec whose payloads are positions and values."""

    def bits(self, share: float, itemsize: int) -> float:
        return 8 * itemsize + position_bits(share)

    def read(self, payload: Payload, elements: int, dtype: torch.dtype) -> SparseVector:
        return unseal_pairs(payload, self.code, elements, dtype)


@dataclass(frozen=True)
class Sparse(Pairs, SparseWire):
    """Sends the non-zero elements, or the whole vector if that is shorter; loses only the sign of -0.

    Sums of sparse vectors are sent this way, in as many elements as any summand has.
    """

    code: ClassVar[int] = 8

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        elements, bits = v.numel(), 8 * v.element_size()
        if int(v.count_nonzero()) * (bits + 1) < elements * bits:  # a position takes at least one bit
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
    """Sends a share of the elements; their average is sent whole, or sparsified too with double feedback."""

    density: float = 0.01  # the share of the elements that is sent
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
