"""PowerSGD: a matrix as the product of two thin ones (Vogels, Karimireddy & Jaggi 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.low_rank.power_sgd import RIGHT, LowRankRounds
from shoal.codecs.wire import seal, unseal
from shoal.core.averaging import Reductions
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import one_of_feedback
from shoal.core.matrices import Matrices, joined, orthonormal, wide
from shoal.core.vector import Piece

KEY = "low rank"
"""Where a worker keeps the state of its averages: only the whole model's vector has one."""


@dataclass(frozen=True)
class LowRank(Codec):
    """Sends P and Q instead of every layer that is a matrix or a convolution, and all others uncompressed.

    For a layer of n x q, they are rank (n + q) numbers. A layer is sent uncompressed if that is not less than
    half of it, or if the vector holds only part of the layer. Workers average P and Q.
    """

    rank: int = 2  # r
    feedback: str = "residual"

    code: ClassVar[int] = 13
    needs_matrices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of_feedback(self.feedback)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: P and Q have at least 1 column; take 1, 2 or 4")

    @property
    def in_flight(self) -> bool:
        return True

    @property
    def merged(self) -> LowRank:
        """Uncompressed unless feedback is double: an average has a higher rank than each of its terms."""
        return self if self.feedback == "double" else self.fit(())

    @property
    def matrices(self) -> Matrices:
        """The layers that are sent as P and Q; none while the layers are not known."""
        return Matrices(self.rank)

    def fit(self, pieces: Sequence[Piece]) -> LowRank:
        found = Matrices.among(pieces, self.rank)
        if not found.each:
            return UncompressedLowRank(self.rank, "none")
        return FittedLowRank(self.rank, self.feedback, found=found)

    def init(self, like: Tensor, seed: int = 0) -> State:
        return {RIGHT: self.matrices.first_right(like)} if self.matrices.each else {}

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        matrices = self.matrices
        before = state.get(RIGHT, v.new_empty(0, dtype=wide(v)))
        p = orthonormal(matrices.lefts(matrices.left(v, before)), before)
        q = matrices.right(v, p)
        return self._sealed(v, p, q, matrices.others(v), state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        """As `encode` and `decode` would, but one matrix after the other, each while it is in cache."""
        matrices = self.matrices
        before = state.get(RIGHT, v.new_empty(0, dtype=wide(v)))
        room = before.new_empty(max((m.rows * m.columns for m in matrices.each), default=0))
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for m, right in zip(matrices.each, matrices.rights(before), strict=True):
            matrix = m.of(rest).add_(m.of(v))
            p = orthonormal([right @ matrix.to(before.dtype).T], before).view(self.rank, -1)
            q = p @ matrix.to(before.dtype)
            product = torch.mm(p.T, q, out=room[: matrix.numel()].view_as(matrix))
            matrix.sub_(product.to(rest.dtype))
            lefts.append(p)
            rights.append(q)
        others = matrices.others(rest).add_(matrices.others(v))
        matrices.put_others(rest, others - others)  # NaN, if they are not finite
        return self._sealed(v, joined(lefts, before), joined(rights, before), others, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        rank, bodies = unseal(payload, self.code, out.numel())
        if rank != self.rank:
            raise WireError(f"a payload of rank {rank} arrived where rank {self.rank} was expected")
        matrices, factors = self.matrices, wide(out)
        rest = out.numel() - sum(m.rows * m.columns for m in matrices.each)
        lengths = (factors, matrices.left_length), (factors, matrices.right_length), (out.dtype, rest)
        p, q, others = expect(bodies, *lengths)
        return matrices.fill(out, p, q, others)

    def _sealed(self, v: Tensor, p: Tensor, q: Tensor, others: Tensor, state: State) -> tuple[Payload, State]:
        """The payload, and the state for the next vector, which begins with this Q."""
        if self.matrices.each and q.isfinite().all():  # otherwise the next would not be finite either
            state = {**state, RIGHT: orthonormal(self.matrices.rights(q), q)}
        return seal(self.code, v.numel(), self.rank, p, q, others), state

    async def average(self, v: Tensor, state: State, workers: Reductions) -> tuple[Tensor, State]:
        if not self.matrices.each:
            return await super().average(v, state, workers)
        rounds = LowRankRounds(self.matrices, v, state, gives=workers.gives)
        first = await workers.mean(rounds.first())
        second = await workers.mean(rounds.second(first))
        return rounds.finish(second, remembers=self.feedback != "none")

    def stream_key(self, elements: int, part: str) -> str:
        return KEY


@dataclass(frozen=True, kw_only=True)
class FittedLowRank(LowRank):
    """For a vector whose layers are known."""

    found: Matrices

    @property
    def matrices(self) -> Matrices:
        return self.found


@dataclass(frozen=True)
class UncompressedLowRank(LowRank):
    """For a vector without a matrix: sends it uncompressed."""

    exact: ClassVar[bool] = True
