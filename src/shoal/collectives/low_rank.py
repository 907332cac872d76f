"""Averages of low rank: two small ones instead of a large one; PowerSGD, Vogels, Karimireddy and Jaggi 2019.

Worker k has M_k, its gradient and what averages lacked of it before. All begin with the same Q. P is the
average of M_k Q, with its columns made orthonormal, and the new Q is the average of M_k' P. Averages are
linear, so P Q' is what a single worker would make of the average of all M_k, and every worker has it. Each
keeps M_k - P Q' for the next time. A layer of n x q costs rank (n + q) numbers instead of n q, in two rounds.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.native import Native
from shoal.collectives.stripes import Striped, stripes
from shoal.core.codec import REST, State
from shoal.core.matrices import Matrices, joined, orthonormal, wide
from shoal.engine.group import PRESENT, Group, Mean

KEY = "low rank"
"""Where a group's codec states have what is remembered from one average to the next."""

RIGHT = "right"
"""Where that has the Q to begin with; beside it is what averages lacked of this worker's vectors."""


class LowRankMean:
    """Averages P and Q in another way to form averages; where no layer is a matrix, the vector itself."""

    def __init__(self, mean: Mean, rank: int, *, remembers: bool = True) -> None:
        self._mean = mean
        self._rank = rank
        self._remembers = remembers
        self._known: Matrices | None = None  # all nodes have the same layers

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        matrices = self._matrices(group)
        if not matrices.each or v.numel() != group.x.numel():
            return await self._mean(group, v, weight)
        meter, states, now = group.meter, group.coding.states, group.now
        began = now()
        rounds = LowRankRounds(matrices, v, states.get(KEY), gives=weight > PRESENT)
        first = rounds.first()
        meter.encode_seconds += now() - began
        averaged, total = await self._mean(group, first, weight)
        if not total:
            return v.new_zeros(v.numel()), total
        began = now()
        second = rounds.second(averaged)
        meter.encode_seconds += now() - began
        averaged, _ = await self._mean(group, second, weight)
        began = now()
        average, states[KEY] = rounds.finish(averaged, self._remembers)
        meter.decode_seconds += now() - began
        self._weigh(group, v.nbytes, first.nbytes + second.nbytes)
        return average, total

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average for later: in stripes, for here the second round has to wait for the first."""
        return await stripes.start(group, v, weight, number, key)

    def _weigh(self, group: Group, dense: int, coded: int) -> None:
        """Account for what was not sent, unless the transport sums: then nobody knows what bytes cost."""
        if not isinstance(self._mean, Native):
            group.coding.weigh(group.coding.averaging(dense), group.coding.averaging(coded))

    def _matrices(self, group: Group) -> Matrices:
        if self._known is None:
            layout = group.coding.layout
            self._known = Matrices.among([] if layout is None else layout.pieces(0, layout.numel), self._rank)
        return self._known


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
