"""VectorShard: the slices of all vectors that one server process holds, and what workers push to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatchmethod

import torch
from torch import Tensor

from shoal.engine.protocol import Instruction, Push
from shoal.lbfgs.operations import (
    AbsoluteSum,
    ClosePass,
    Combine,
    Dots,
    DropPass,
    EndTraining,
    OpenPass,
    Operation,
    decoded,
)
from shoal.vocabulary.node import Node


class VectorShard:
    """One slice of x, g, d and all pairs.

    Whether a push counts is known only when all shards have it and the coordinator knows. So a shard holds
    each worker's latest bundle back, until that worker's next one, or the end of the pass, tells.
    """

    def __init__(self, s: Node) -> None:
        self._node = s
        wide = torch.promote_types(s.x.dtype, torch.float32)
        self._sum = s.keep("sum", torch.zeros_like(s.x, dtype=wide))
        self._open: int | None = None  # the number of the pass whose gradients are added up
        self._held: dict[tuple[int, int], tuple[int, Tensor]] = {}  # (rank, incarnation) -> its latest bundle
        self._samples = 0.0  # of a pass that has ended, not reported yet
        self.point.copy_(s.x)

    @property
    def point(self) -> Tensor:
        """What workers pull."""
        return self._vector("point")

    def take_in(self, push: Push) -> None:
        """A bundle of gradients of one worker: their sum, with the pass and the number of the bundle.

        It also tells the number of the worker's last bundle that counts.
        """
        assert push.numbers is not None
        number, bundle, settled = map(int, push.numbers.tolist())
        if number != self._open:
            return
        sender = push.src, push.incarnation
        if sender in self._held:
            before, gradient = self._held.pop(sender)
            if before == settled:
                self._sum.add_(gradient)
        self._held[sender] = bundle, push.body

    async def obey(self, m: Instruction) -> None:
        """Do what the coordinator asks for."""
        self._node.engine.service.answer(m, *self.run(decoded(m.body)))

    def run(self, operations: Sequence[Operation]) -> list[float]:
        """Do these in order, and return all their partial sums."""
        return [value for one in operations for value in self._do(one)]

    # -- inside --------------------------------------------------------------------------------

    def _vector(self, name: str) -> Tensor:
        s = self._node
        return s.x if name == "x" else s.keep(name, torch.zeros_like(s.x))

    @singledispatchmethod
    def _do(self, one: Operation) -> Sequence[float]:
        raise TypeError(f"{one!r} is no operation on vectors")

    @_do.register
    def _(self, one: Combine) -> Sequence[float]:
        out = self._vector(one.out)
        total = torch.zeros_like(out)
        for factor, name in one.terms:
            total.add_(self._vector(name), alpha=factor)
        out.copy_(total)
        return ()

    @_do.register
    def _(self, one: Dots) -> Sequence[float]:
        return [float(torch.dot(self._wide(a), self._wide(b))) for a, b in one.pairs]

    @_do.register
    def _(self, one: AbsoluteSum) -> Sequence[float]:
        return [float(self._wide(one.name).abs().sum())]

    @_do.register
    def _(self, one: OpenPass) -> Sequence[float]:
        self._report()
        self._open = one.number
        return ()

    @_do.register
    def _(self, one: ClosePass) -> Sequence[float]:
        counts = set(one.delivered)
        for (rank, _), (bundle, gradient) in self._held.items():
            if (rank, bundle) in counts:
                self._sum.add_(gradient)
        new = self._vector("new")
        new.copy_(self._sum.div_(one.samples))
        if one.l2:
            new.add_(self.point, alpha=one.l2)
        self._end_pass(one.samples)
        return ()

    @_do.register
    def _(self, one: DropPass) -> Sequence[float]:
        self._end_pass(one.samples)
        return ()

    @_do.register
    def _(self, one: EndTraining) -> Sequence[float]:
        self._report()
        return ()

    def _wide(self, name: str) -> Tensor:
        return self._vector(name).double()

    def _end_pass(self, samples: float) -> None:
        self._open = None
        self._held.clear()
        self._sum.zero_()
        self._samples = samples

    def _report(self) -> None:
        """The samples of the last pass are in the model: the step that they led to is made."""
        if self._samples:
            self._node.advance(self._samples)
            self._samples = 0.0
