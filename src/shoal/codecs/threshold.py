"""A threshold: what exceeds it travels as a sign and the way to the next (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs import gaps
from shoal.codecs.pairs import position_bits, two
from shoal.codecs.selection import above, check_density, how_many, sample
from shoal.codecs.sparse import Sparse
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect, one_of_feedback
from shoal.core.errors import WireError
from shoal.core.sparse import SparseCodec, SparseVector


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Sends tau with its sign for every element larger than tau: at most one tau for each vector.

    So an element that always exceeds tau falls behind: tau is to be larger than most are. Without tau, every
    vector has its own: just below the size that the wanted share of a sample reaches, or the mean size of
    what is not zero where that is less. If anything sent is not finite, all arrives as not a number.
    """

    code: ClassVar[int] = 11

    tau: float | None = None
    density: float = 0.0036  # the share of the elements that is to travel, without tau
    feedback: str = "residual"

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 < self.tau < torch.inf:
            raise ValueError(f"tau={self.tau} should be above 0, in the units of what travels, or none")
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
            raise WireError(f"a threshold of {tau} arrived, which none has")
        positions, negative = gaps.unpack(stream, count, elements, signed=True)
        values = torch.full((count,), tau, dtype=dtype, device=positions.device)
        return SparseVector(elements, torch.where(negative, -values, values), positions)

    def _sealed(self, elements: int, positions: Tensor, large: Tensor, tau: float) -> Payload:
        told = torch.tensor([tau if large.isfinite().all() else torch.nan], dtype=torch.float32)
        stream = gaps.pack(positions, elements, large.signbit())
        return seal(self.code, elements, positions.numel(), stream, told)

    def _tau(self, u: Tensor, add: Tensor | None) -> float:
        """Tau as both float32 and the dtype of `u` have it."""
        tau = _found(u, add, self.density) if self.tau is None else self.tau
        rounded = float(torch.tensor(tau, dtype=torch.float32).to(u.dtype))
        if not 0 < rounded < torch.inf:
            raise ValueError(f"tau={tau} is out of the range of {u.dtype}: take one in it, or another dtype")
        return rounded


def _found(u: Tensor, add: Tensor | None, density: float) -> float:
    some = sample(u, add).float()
    top = some.topk(how_many(density, some.numel())).values
    if len(top) and 0 < top[-1] < torch.inf:
        return 0.99 * float(top[-1])  # so that this very size exceeds it, of which there may be many
    sizes = (u if add is None else u + add).abs().float()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    return float(sizes.mean(dtype=torch.float64)) if len(sizes) else 1.0
