"""Sufficient-factor broadcasting: the inputs and errors whose product is a gradient (Xie et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.factors.broadcasting import average_products
from shoal.codecs.wire import seal, unseal
from shoal.core.averaging import Reductions
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.vector import Piece


@dataclass(frozen=True)
class Factors(Codec):
    """Sends the inputs and errors of fully connected layers instead of gradients if they are smaller. Exact.

    For a layer of n x q and K samples, they are K (n + q) numbers. Only an average of gradients has them: see
    `shoal.codecs.factors.broadcasting`. Any other vector is sent uncompressed.
    """

    code: ClassVar[int] = 14
    needs_products: ClassVar[bool] = True

    @property
    def in_flight(self) -> bool:
        return True

    def fit(self, pieces: Sequence[Piece]) -> Factors:
        return UncompressedFactors()

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return seal(self.code, v.numel(), v.numel(), v.clone()), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (v,) = expect(bodies, (out.dtype, out.numel()))
        return v

    async def average(self, v: Tensor, state: State, workers: Reductions) -> tuple[Tensor, State]:
        if workers.records is None:
            return await super().average(v, state, workers)
        return await average_products(v, workers.records, workers), state


@dataclass(frozen=True)
class UncompressedFactors(Factors):
    """For a vector whose factors are not known: sends it uncompressed."""

    exact: ClassVar[bool] = True
