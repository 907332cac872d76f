"""Averages on a shared scale: what travels are whole numbers, and they are added up on the way.

First the workers agree on a scale, the largest that any of them needs, and on the sum of their weights. Then
any way to sum will do, and it is exact: nothing is compressed anew on the way back. TernGrad calls that
scaler sharing (Wen et al. 2017). The scales, which are few, travel in log2 P rounds, as in a butterfly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.average import Sum
from shoal.collectives.butterfly import swap
from shoal.collectives.native import native
from shoal.core.codec import REST, State, expect
from shoal.core.transport import Message
from shoal.engine.group import PRESENT, Group

KEY = "shared scale"
"""Where a group's codec states have what is remembered from one average to the next."""


class Scaled(Protocol):
    """What one worker brings to an average, as whole numbers of a scale."""

    def scales(self) -> Tensor:
        """What it would take by itself, in float32: of all workers' the largest is taken."""
        ...

    def words(self, shared: Tensor) -> Tensor:
        """What is to be summed over the workers, in int32, given that."""
        ...

    def finish(self, summed: Tensor, total: float) -> tuple[Tensor, State]:
        """The average, given the sum and the sum of the weights; and the state for the next vector."""
        ...


class SharedScaleMean:
    """Averages by this sum. `bring` takes a vector, its weight, the number of workers and a codec's state."""

    def __init__(self, bring: Callable[[Tensor, float, int, State], Scaled], add_up: Sum) -> None:
        self._bring, self._add_up = bring, add_up

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        return await self._average(group, v, weight, "")

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> _Later:
        """Begin an average for later: all of it is done then, for the second round waits for the first."""
        return _Later(partial(self._average, group, v.clone(), weight, key))

    async def _average(self, group: Group, v: Tensor, weight: float, part: str) -> tuple[Tensor, float]:
        coding, meter, now = group.coding, group.meter, group.now
        key, gives, began = f"{KEY} {v.numel()} {part}", weight > PRESENT, now()
        state = coding.state_of(key, coding.codec, v)
        brings = state if gives else {name: kept for name, kept in state.items() if name != REST}
        brought = self._bring(v, weight, group.size, brings)
        largest = _Largest(group, brought.scales(), weight)
        meter.encode_seconds += now() - began
        await swap(group, largest)
        if not largest.weight:
            return v.new_zeros(v.numel()), 0.0
        began = now()
        words = brought.words(largest.scales)
        meter.encode_seconds += now() - began
        await self._add_up(group, words)
        began = now()
        average, after = brought.finish(words, largest.weight)
        meter.decode_seconds += now() - began
        coding.states[key] = after if gives else state  # who gave nothing lacks what it lacked
        if self._add_up is not native:  # whose bytes nobody knows the price of
            coded = words.nbytes + largest.scales.nbytes
            coding.weigh(coding.averaging(v.nbytes), coding.averaging(coded))
        return average, largest.weight


class _Later:
    """An average that is formed when it is needed."""

    def __init__(self, form: Callable[[], Awaitable[tuple[Tensor, float]]]) -> None:
        self._form = form

    async def progress(self) -> None:
        """Nothing can be done without waiting."""

    async def finish(self) -> tuple[Tensor, float]:
        """The average, and the total weight."""
        return await self._form()


class _Largest:
    """A load: the largest scale of each block so far, and the sum of the weights."""

    def __init__(self, group: Group, scales: Tensor, weight: float) -> None:
        self.scales, self.weight = scales, weight
        self._group = group

    async def give(self, dst: int, tag: str) -> None:
        """Send both."""
        await self._group.send(dst, Message(tag, (self.scales,), count=self.weight))

    async def add(self, src: int, tag: str) -> None:
        """Take the larger of each, and not a number where either is none."""
        scales, weight = await self._take(src, tag)
        self.scales, self.weight = torch.maximum(self.scales, scales), self.weight + weight

    async def replace(self, src: int, tag: str) -> None:
        """Take what arrives."""
        self.scales, self.weight = await self._take(src, tag)

    async def _take(self, src: int, tag: str) -> tuple[Tensor, float]:
        m = await self._group.take(tag, src)
        (scales,) = expect(m.parts, (self.scales.dtype, self.scales.numel()))
        return scales.to(self.scales.device), m.count
