"""Sufficient-factor broadcasting: the inputs and errors whose product is a gradient (Xie et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.vector import Piece


@dataclass(frozen=True)
class Factors(Codec):
    """Sends the inputs and errors of fully connected layers instead of gradients if they are smaller. Exact.

    For a layer of n x q and K samples, they are K (n + q) numbers. Only an average of gradients has them: see
    `shoal.collectives.factors`. Any other vector is sent uncompressed.
    """

    code: ClassVar[int] = 14
    for_averages: ClassVar[bool] = True

    def fit(self, pieces: Sequence[Piece]) -> Factors:
        return UncompressedFactors()

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return seal(self.code, v.numel(), v.numel(), v.clone()), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (v,) = expect(bodies, (out.dtype, out.numel()))
        return v


@dataclass(frozen=True)
class UncompressedFactors(Factors):
    """For a vector whose factors are not known: sends it uncompressed."""

    exact: ClassVar[bool] = True
