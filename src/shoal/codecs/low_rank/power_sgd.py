"""Averages of low rank: two small ones instead of a large one; PowerSGD, Vogels, Karimireddy and Jaggi 2019.

Worker k has M_k, its gradient and what averages lacked of it before. All begin with the same Q. P is the
average of M_k Q, with its columns made orthonormal, and the new Q is the average of M_k' P. Averages are
linear, so P Q' is what a single worker would make of the average of all M_k, and every worker has it. Each
keeps M_k - P Q' for the next time. A layer of n x q costs rank (n + q) numbers instead of n q, in two rounds.
"""

from __future__ import annotations

from torch import Tensor

from shoal.core.codec import REST, State
from shoal.core.matrices import Matrices, joined, orthonormal, wide

RIGHT = "right"
"""The key of the state under which the next Q starts; beside it is what averages lacked of the vectors."""


class LowRankRounds:
    """One such average, whoever forms the two that it takes. Both have to have the same weights.

    A worker without weight, who `gives` nothing, keeps what it lacks for another time.
    """

    def __init__(self, matrices: Matrices, v: Tensor, state: State | None, *, gives: bool = True) -> None:
        self._matrices, self._gives = matrices, gives
        self._state = state or {RIGHT: matrices.first_right(v)}
        self._v = v
        rest = self._state.get(REST) if gives else None
        self._given = v.to(wide(v)) if rest is None else v + rest  # M_k
        self._p = self._others = v.new_empty(0)

    def first(self) -> Tensor:
        """What is averaged first: M_k Q, and all that is in no matrix."""
        left = self._matrices.left(self._given, self._state[RIGHT])
        return joined((left, self._matrices.others(self._v)), self._v)

    def second(self, averaged: Tensor) -> Tensor:
        """What is averaged next, given the average of the first: M_k' P."""
        length = self._matrices.left_length
        self._p = orthonormal(self._matrices.lefts(averaged[:length]), self._state[RIGHT])
        self._others = averaged[length:]
        return self._matrices.right(self._given, self._p).to(self._v.dtype)

    def finish(self, averaged: Tensor, remembers: bool) -> tuple[Tensor, State]:
        """The average of the vectors, given that of the second; and the state for the next ones.

        What is not finite leaves the state as it was.
        """
        matrices, q = self._matrices, averaged.to(self._p.dtype)
        average = matrices.fill(self._v.new_empty(self._v.numel()), self._p, q, self._others)
        if not q.isfinite().all():
            return average, self._state
        state = {**self._state, RIGHT: orthonormal(matrices.rights(q), q)}
        if remembers and self._gives:
            state[REST] = rest = self._given - average
            for gap in matrices.gaps(rest.numel()):
                rest[gap] = 0.0
        return average, state
