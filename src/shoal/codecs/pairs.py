"""Pairs: a sparse vector as positions and values, the positions in the code of `gaps`.

The header's count says how many values travel. If that is all of the vector there is one body, the vector.
Otherwise there are two: the stream of positions, and the values in the vector's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs import gaps
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Payload, expect
from shoal.core.errors import WireError
from shoal.core.sparse import SparseCodec, SparseVector

MANY = 1 << 40  # elements: any share of them is a whole number of them, but for what does not matter


def seal_pairs(code: int, elements: int, positions: Tensor, values: Tensor) -> Payload:
    """What travels for these values at these rising positions."""
    if values.numel() == elements:
        return seal(code, elements, elements, values)
    return seal(code, elements, values.numel(), gaps.pack(positions, elements), values)


def unseal_pairs(payload: Payload, code: int, elements: int, dtype: torch.dtype) -> SparseVector:
    """The vector that was sealed so; raises WireError for what was not."""
    count, bodies = unseal(payload, code, elements)
    if count == elements:
        (values,) = expect(bodies, (dtype, count))
        return SparseVector(elements, values.flatten())
    stream, values = two(bodies)
    expect((values,), (dtype, count))
    positions, _ = gaps.unpack(stream, count, elements)
    return SparseVector(elements, values.flatten(), positions)


class Pairs(SparseCodec):
    """A codec whose payloads are such pairs."""

    def bits(self, share: float, itemsize: int) -> float:
        return 8 * itemsize + position_bits(share)

    def read(self, payload: Payload, elements: int, dtype: torch.dtype) -> SparseVector:
        return unseal_pairs(payload, self.code, elements, dtype)


def position_bits(share: float) -> float:
    """How many bits a position takes on average, where every element is there with probability p.

    A gap of g is as likely as p (1 - p)^g, so that the mean of q is r / (1 - r) with r = (1 - p)^(2^k).
    """
    k = gaps.low_bits(max(1, round(share * MANY)), MANY)
    return k + 1 / (1 - (1 - share) ** (1 << k)) if share else 0.0


def two(bodies: Payload) -> tuple[Tensor, Tensor]:
    """The two bodies; raises WireError for another number of them."""
    if len(bodies) != 2:
        raise WireError(f"a payload of {len(bodies)} bodies arrived where 2 were expected")
    return bodies[0], bodies[1]
