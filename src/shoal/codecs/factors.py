"""Factors: what gradients are made of, inputs and errors; sufficient-factor broadcasting, Xie et al. 2016."""

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
    """Sends the inputs and errors of fully connected layers instead of gradients where that is less. Exact.

    Of a layer of n x q and K samples that is K (n + q) numbers. Only an average of gradients knows what they
    are made of, see `shoal.collectives.factors`; a vector by itself travels as it is.
    """

    code: ClassVar[int] = 14
    for_averages: ClassVar[bool] = True

    def fit(self, pieces: Sequence[Piece]) -> Factors:
        return Whole()

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return seal(self.code, v.numel(), v.numel(), v.clone()), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (v,) = expect(bodies, (out.dtype, out.numel()))
        return v


@dataclass(frozen=True)
class Whole(Factors):
    """The same for a vector of which nothing else is known."""

    exact: ClassVar[bool] = True
