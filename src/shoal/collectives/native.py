"""The transport's own all-reduce: the order of its sums is its own.

A gradient is summed part by part, while back-propagation still computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shoal.collectives.average import averaging
from shoal.collectives.stripes import Striped, stripes
from shoal.core.transport import AllReduces, Overlaps, Reduction
from shoal.engine.streaming import Streamed
from shoal.vocabulary.node import Node

_HEAD = 16
"""Elements before the gradient, so that it begins where memory is read fastest. The last two are used."""

_WEIGHT = _HEAD - 2


async def native(node: Node, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    await _complete(node, _Whole(node, v))


class Native:
    """Averages by the transport's own all-reduce. Each node needs its own."""

    def __init__(self) -> None:
        self._mean = averaging(native)
        self._paths: list[Path] = []

    async def __call__(self, node: Node, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        return await self._mean(node, v, weight)

    async def start(self, node: Node, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average for later: in stripes, for all-reduces follow each other."""
        return await stripes.start(node, v, weight, number, key)

    def begin(self, node: Node, parts: Sequence[slice]) -> Merged:
        """Begin to average a gradient that is still to be computed, in these parts."""
        if not self._paths:  # two: the model's gradients may lie in the one that was used last
            with_head = _with_head(parts)
            self._paths = [Path(node, with_head) for _ in range(2)]
        self._paths.reverse()
        return Merged(node, self._paths[0])


def _with_head(parts: Sequence[slice]) -> list[slice]:
    """The parts of what is summed: the last of them, which is the first of the gradient, has the head."""
    *others, last = parts
    assert last.start == 0, "the first parameter is to come last"
    return [*(slice(2 + part.start, 2 + part.stop) for part in others), slice(0, 2 + last.stop)]


class Path:
    """What gradients take in turn, made once: a vector with a head, and its parts."""

    def __init__(self, node: Node, parts: list[slice]) -> None:
        wide = torch.promote_types(node.x.dtype, torch.float32)
        buffer = node.x.new_empty(_HEAD + node.x.numel(), dtype=wide)
        self.head, self.out, self.summed = buffer[_WEIGHT:_HEAD], buffer[_HEAD:], buffer[_WEIGHT:]
        self.parts = parts
        self.overlaps = isinstance(node.transport, Overlaps)


class Merged:
    """One gradient on its way.

    The last part, which is the first of the vector, takes along the weight and whether this worker has
    to take back what it handed over; where one has, all begin anew.
    """

    def __init__(self, node: Node, path: Path) -> None:
        self.out = path.out
        # All weights together are mostly what they were before: then nothing is left to be divided.
        self._kept = node.keep("total weight", torch.ones(1, dtype=torch.float64))
        self._expected = self._kept.item()
        self.unit = 1 / self._expected
        self._node = node
        self._path = path
        self._reduction: Reduction | None = None  # from the first part on

    @property
    def begun(self) -> bool:
        """Whether a part is under way."""
        return self._reduction is not None

    def ready(self, part: int) -> None:
        """Sum a part that is in `out`."""
        if self._reduction is None:
            self._reduction = self._begun()
        self._reduction.start(part)

    async def finish(self, gradient: Streamed, weight: float) -> tuple[Tensor, float]:
        """The average, and the total weight."""
        total, is_taken_back = await self._sum(weight, gradient.changed)
        if is_taken_back:
            gradient.fill()
            total, _ = await self._sum(weight, False)
        if total != self._expected:
            if total > 0:
                self.out.mul_(self._expected / total)
            if total >= 1:
                self._kept.fill_(total)
        return self.out.to(self._node.x.dtype), total

    async def _sum(self, weight: float, changed: bool) -> tuple[float, float]:
        """Sum what is in `out`; all weights together, and how many workers take back what they gave."""
        self._path.head.copy_(torch.tensor((weight, changed), dtype=torch.float64))
        reduction, self._reduction = self._reduction or self._begun(), None
        await _complete(self._node, reduction)
        total, takers = self._path.head.tolist()
        return total, takers

    def _begun(self) -> Reduction:
        node, path = self._node, self._path
        if not path.overlaps:
            return _Whole(node, path.summed)
        return cast(Overlaps, node.transport).begin_all_reduce(path.summed, path.parts, node.timeout)


class _Whole:
    """An all-reduce that cannot begin before all is there."""

    def __init__(self, node: Node, v: Tensor) -> None:
        self._node, self._v = node, v

    def start(self, part: int) -> None:
        """It has to wait."""

    async def finish(self) -> int:
        """Do all of it."""
        return await cast(AllReduces, self._node.transport).all_reduce(self._v, self._node.timeout)


async def _complete(node: Node, reduction: Reduction) -> None:
    began = node.transport.now()
    sent = await reduction.finish()
    node.meter.wait_seconds += node.transport.now() - began
    node.meter.bytes_sent += sent
    node.meter.bytes_received += sent
