"""The transport's own all-reduce, which sums in an order of its own.

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
from shoal.engine.group import Group
from shoal.engine.streaming import Streamed

_HEAD = 16
"""Elements before the gradient, which align it in memory. Only the last two are used."""

_WEIGHT = _HEAD - 2


async def native(group: Group, v: Tensor) -> None:
    """Sum `v` over the workers, in place."""
    await _complete(group, _Whole(group, v))


class Native:
    """Averages by the transport's own all-reduce. Each group needs its own object."""

    def __init__(self) -> None:
        self._mean = averaging(native)
        self._paths: list[Path] = []

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        return await self._mean(group, v, weight)

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average in the background: in stripes, because all-reduces run one at a time."""
        return await stripes.start(group, v, weight, number, key)

    def begin(self, group: Group, parts: Sequence[slice]) -> Merged:
        """Begin to average a gradient that is not computed yet, in these parts."""
        if not self._paths:  # two: the model's gradients may be views of the one used last
            with_head = _with_head(parts)
            self._paths = [Path(group, with_head) for _ in range(2)]
        self._paths.reverse()
        return Merged(group, self._paths[0])


def _with_head(parts: Sequence[slice]) -> list[slice]:
    """The parts of the summed vector: those of the gradient, with the head joined to the part it precedes.

    That part holds the gradient's first elements and is the last to be summed.
    """
    *others, last = parts
    assert last.start == 0, "the part with the first parameter must come last"
    return [*(slice(2 + part.start, 2 + part.stop) for part in others), slice(0, 2 + last.stop)]


class Path:
    """A reusable buffer for one gradient, with a head before it, and the parts in which it is summed."""

    def __init__(self, group: Group, parts: list[slice]) -> None:
        wide = torch.promote_types(group.x.dtype, torch.float32)
        buffer = group.x.new_empty(_HEAD + group.x.numel(), dtype=wide)
        self.head, self.out, self.summed = buffer[_WEIGHT:_HEAD], buffer[_HEAD:], buffer[_WEIGHT:]
        self.parts = parts
        self.overlaps = isinstance(group.transport, Overlaps)


class Merged:
    """One gradient that is being averaged.

    The part that is summed last also carries the worker's weight, and a flag: whether gradients changed after
    the worker had handed them over. If any worker sets the flag, all workers sum the gradient again. So they
    do where one has gone meanwhile: what was begun with it is given up.
    """

    def __init__(self, group: Group, path: Path) -> None:
        self.out = path.out
        # The total weight is mostly that of the step before. Then the sum needs no division.
        self._kept = group.keep("total weight", torch.ones(1, dtype=torch.float64), shared=True)
        self._expected = self._kept.item()
        self.unit = 1 / self._expected
        self._group = group
        self._path = path
        self._reduction: Reduction | None = None  # set when the first part is ready
        self._began_in = self._group_now  # at the first part, or in `finish`
        self._is_own = True  # nothing has been added to the gradient in `out`

    @property
    def begun(self) -> bool:
        """Whether the sum of a part has begun."""
        return self._reduction is not None

    def ready(self, part: int) -> None:
        """Begin to sum a part, which is complete in `out`."""
        if self._reduction is None:
            self._reduction = self._begun()
        self._reduction.start(part)

    async def finish(self, gradient: Streamed, weight: float) -> tuple[Tensor, float]:
        """Wait for the sum. Returns the average and the total weight. If it fails it can be called again."""
        if self._began_in != self._group_now or not (self.begun or self._is_own):
            self._reduction, self._is_own = None, True
            gradient.fill()
        total, is_taken_back = await self._sum(weight, gradient.changed)
        if is_taken_back:
            gradient.fill()
            total, _ = await self._sum(weight, False)
        if total not in (0, self._expected):
            self.out.mul_(self._expected / total)
        return self.out.to(self._group.x.dtype), total

    def settle(self, total: float) -> None:
        """Expect the weight of this average for the next, at all workers: some may not have formed it."""
        if total >= 1:
            self._kept.fill_(total)

    async def _sum(self, weight: float, changed: bool) -> tuple[float, float]:
        """Sum `out` over the workers. Returns the total weight, and how many workers set the flag."""
        self._path.head.copy_(torch.tensor((weight, changed), dtype=torch.float64))
        reduction, self._reduction = self._reduction or self._begun(), None
        await _complete(self._group, reduction)
        total, takers = self._path.head.tolist()
        return total, takers

    @property
    def _group_now(self) -> tuple[int, int]:
        return self._group.epoch, self._group.size

    def _begun(self) -> Reduction:
        group, path = self._group, self._path
        self._began_in, self._is_own = self._group_now, False
        if not path.overlaps:
            return _Whole(group, path.summed)
        return cast(Overlaps, group.transport).begin_all_reduce(path.summed, path.parts, group.timeout)


class _Whole:
    """An all-reduce that begins only when the whole vector is complete."""

    def __init__(self, group: Group, v: Tensor) -> None:
        self._group, self._v = group, v

    def start(self, part: int) -> None:
        """Do nothing: `finish` sums all parts at once."""

    async def finish(self) -> int:
        """Sum the vector. Returns the bytes sent."""
        return await cast(AllReduces, self._group.transport).all_reduce(self._v, self._group.timeout)


async def _complete(group: Group, reduction: Reduction) -> None:
    began = group.now()
    sent = await reduction.finish()
    group.meter.wait_seconds += group.now() - began
    group.meter.bytes_sent += sent
    group.meter.bytes_received += sent
