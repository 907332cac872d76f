"""Threshold sparsification: the sign of each element above tau, and the gap to the next one (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.sparse import gaps
from shoal.codecs.sparse.codec import Sparse, position_bits, two
from shoal.codecs.sparse.selection import above, how_many, sample
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_density, one_of_feedback
from shoal.core.sparse_vectors import SparseCodec, SparseVector


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Sends +tau or -tau for every element whose magnitude exceeds tau; never more than one tau a vector.

    So an element that always exceeds tau falls behind: choose tau above most magnitudes. Without tau, each
    vector has its own: just below the magnitude that the wanted share of a sample reaches, or, where that is
    not finite or 0, the mean magnitude of the non-zero elements. If an element sent is not finite, all are
    decoded as NaN.
    """

    code: ClassVar[int] = 11

    tau: float | None = None
    density: float = 0.0036  # the share of the elements to send, without tau
    feedback: str = "residual"

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 < self.tau < torch.inf:
            raise ValueError(f"tau={self.tau} should be above 0, in the units of the vector, or none")
        check_density(self.density)
        one_of_feedback(self.feedback)

    @property
    def share(self) -> float | None:
        return self.density if self.tau is None else None

    @property
    def merged(self) -> Codec:
        return self if self.feedback == "double" else Sparse()

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        tau = self._tau(v, None)
        return self._sealed(v.numel(), *above(v, tau), tau), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        tau = self._tau(rest, v)
        positions, large = above(rest, tau, add=v)
        rest[positions] = large - large.sign() * tau
        return self._sealed(v.numel(), positions, large, tau), state

    def bits(self, share: float, itemsize: int) -> float:
        return position_bits(share) + 1

    def read(self, payload: Payload, elements: int, dtype: torch.dtype) -> SparseVector:
        count, bodies = unseal(payload, self.code, elements)
        stream, told = two(bodies)
        expect((told,), (torch.float32, 1))
        tau = float(told)
        if not (0 < tau < torch.inf or isnan(tau)):
            raise WireError(f"a payload of codec 'threshold' has tau={tau}, not above 0 and finite, nor NaN")
        positions, negative = gaps.unpack(stream, count, elements, signed=True)
        values = torch.full((count,), tau, dtype=dtype, device=positions.device)
        return SparseVector(elements, torch.where(negative, -values, values), positions)

    def _sealed(self, elements: int, positions: Tensor, large: Tensor, tau: float) -> Payload:
        told = torch.tensor([tau if large.isfinite().all() else torch.nan], dtype=torch.float32)
        stream = gaps.pack(positions, elements, large.signbit())
        return seal(self.code, elements, positions.numel(), stream, told)

    def _tau(self, u: Tensor, add: Tensor | None) -> float:
        """Tau, rounded to both float32 and the dtype of `u`."""
        tau = _found(u, add, self.density) if self.tau is None else self.tau
        rounded = float(torch.tensor(tau, dtype=torch.float32).to(u.dtype))
        if not 0 < rounded < torch.inf:
            raise ValueError(
                f"tau={tau} is out of the range of {u.dtype}: take another tau, or a wider dtype"
            )
        return rounded


def _found(u: Tensor, add: Tensor | None, density: float) -> float:
    some = sample(u, add).float()
    top = some.topk(how_many(density, some.numel())).values
    if len(top) and 0 < top[-1] < torch.inf:
        return 0.99 * float(top[-1])  # so that all elements of exactly this magnitude exceed it
    sizes = (u if add is None else u + add).abs().float()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    return float(sizes.mean(dtype=torch.float64)) if len(sizes) else 1.0
