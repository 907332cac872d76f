"""Pairs: a sparse vector as positions and values, the positions in the code of `gaps`.

The header's count says how many values travel. If that is all of the vector there is one body, the vector.
Otherwise there are two: the stream of positions, and the values in the vector's own dtype.
"""

from __future__ import annotations

from torch import Tensor

from shoal.codecs import gaps
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Payload, expect
from shoal.core.errors import WireError


def seal_pairs(code: int, elements: int, positions: Tensor, values: Tensor) -> Payload:
    """What travels for these values at these rising positions."""
    if values.numel() == elements:
        return seal(code, elements, elements, values)
    return seal(code, elements, values.numel(), gaps.pack(positions, elements), values)


def unseal_pairs(payload: Payload, code: int, out: Tensor) -> Tensor:
    """Write into `out` what was sealed so; raises WireError for what was not."""
    count, bodies = unseal(payload, code, out.numel())
    if count == out.numel():
        (values,) = expect(bodies, (out.dtype, count))
        return out.copy_(values)
    stream, values = two(bodies)
    expect((values,), (out.dtype, count))
    positions, _ = gaps.unpack(stream, count, out.numel())
    out.zero_()[positions] = values
    return out


def two(bodies: Payload) -> tuple[Tensor, Tensor]:
    """The two bodies; raises WireError for another number of them."""
    if len(bodies) != 2:
        raise WireError(f"a payload of {len(bodies)} bodies arrived where 2 were expected")
    return bodies[0], bodies[1]
