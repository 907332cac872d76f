"""Low rank: a matrix as the product of two thin ones; PowerSGD, Vogels, Karimireddy and Jaggi 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect, one_of_feedback
from shoal.core.errors import WireError
from shoal.core.matrices import Matrices, orthonormal, wide
from shoal.core.vector import Piece

RIGHT = "right"
"""Where the state has the Q to begin with."""


@dataclass(frozen=True)
class LowRank(Codec):
    """Sends P and Q instead of every layer that is a matrix or a kernel, and all else as it is.

    Of a layer of n x q that is rank (n + q) numbers; where they are not less than half of it, or where a part
    of the layer is somewhere else, it is sent as it is. Averages over all workers are formed of P and of Q.
    """

    rank: int = 2  # r
    feedback: str = "residual"

    code: ClassVar[int] = 13

    def __post_init__(self) -> None:
        one_of_feedback(self.feedback)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: P and Q have at least 1 column; take 1, 2 or 4")

    @property
    def merged(self) -> LowRank:
        """An average has more ranks than what went into it: without feedback of its own it goes whole."""
        return self if self.feedback == "double" else self.fit(())

    @property
    def matrices(self) -> Matrices:
        """What is sent as P and Q: nothing, while the layers are not known."""
        return Matrices(self.rank)

    def fit(self, pieces: Sequence[Piece]) -> LowRank:
        found = Matrices.among(pieces, self.rank)
        return Fitted(self.rank, self.feedback, found=found) if found.each else Whole(self.rank, "none")

    def init(self, like: Tensor, seed: int = 0) -> State:
        return {RIGHT: self.matrices.first_right(like)} if self.matrices.each else {}

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        matrices = self.matrices
        before = state.get(RIGHT, v.new_empty(0, dtype=wide(v)))
        p = orthonormal(matrices.lefts(matrices.left(v, before)), before)
        q = matrices.right(v, p)
        payload = seal(self.code, v.numel(), self.rank, p, q, matrices.others(v))
        if matrices.each and q.isfinite().all():  # else the next vector would not be finite either
            state = {**state, RIGHT: orthonormal(matrices.rights(q), q)}
        return payload, state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        rank, bodies = unseal(payload, self.code, out.numel())
        if rank != self.rank:
            raise WireError(f"a payload of rank {rank} arrived where rank {self.rank} was expected")
        matrices, factors = self.matrices, wide(out)
        rest = out.numel() - sum(m.rows * m.columns for m in matrices.each)
        lengths = (factors, matrices.left_length), (factors, matrices.right_length), (out.dtype, rest)
        p, q, others = expect(bodies, *lengths)
        return matrices.fill(out, p, q, others)


@dataclass(frozen=True, kw_only=True)
class Fitted(LowRank):
    """The same for a vector whose layers are known."""

    found: Matrices

    @property
    def matrices(self) -> Matrices:
        return self.found


@dataclass(frozen=True)
class Whole(LowRank):
    """The same for a vector without a matrix: all of it is sent as it is, and nothing is lacking."""

    exact: ClassVar[bool] = True
