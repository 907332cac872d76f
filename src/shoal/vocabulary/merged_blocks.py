"""Merged blocks: local steps in blocks, and the mean of what they moved, at once or one block late.

One block late, a worker begins the mean of what it moved in a block, m_k, and goes on:

    block j:       local steps from W + m_k(j-1) to W + m_k(j-1) + m_k(j)
    at its end:    W ← an outer step on the mean of m_k(j-1), which has had the whole block to arrive
                   x_k ← W + m_k(j);   the mean of m_k(j) is under way from now on

So all that a worker moves is in one mean, and never counts twice: it is in x_k while the mean is under way,
and then in W. At the end, and when a worker has gone or is to take part, the mean of m_k(j) is taken in at
once, too: then all stand at W.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.operation import Operation
from shoal.vocabulary.node import Node


@dataclass(frozen=True)
class MergedBlock:
    """A block of all workers."""

    update: Tensor  # the mean of what they moved
    lr: float  # of the block's last step
    is_warmup: bool  # whether the block is one step of the warm-up


def check_overlap(overlap: int) -> None:
    """Raise ValueError for a mean that is more than one block late."""
    if overlap not in (0, 1):
        raise ValueError(f"overlap={overlap}: a mean is taken in at once, 0, or one block late, 1")


async def merged_blocks(
    w: Node, start: Tensor, period: int, warmup: int = 0, overlap: int = 0, sign: int = 1
) -> AsyncIterator[MergedBlock]:
    """Do local steps and yield the mean of x - `start` for each block; the caller moves `start` by it.

    The worker then goes on from there. A `sign` of -1 makes it the mean of `start` - x. With `overlap=1` all
    but the steps of the warm-up are yielded one block late.
    """
    if overlap:
        async for merged in _late_blocks(w, start, period, warmup, sign):
            yield merged
        return
    async for t in w.blocks(period, warmup):
        yield await _merged_at_once(w, start, sign, is_warmup=t < warmup)
        w.x.copy_(start)


async def _merged_at_once(w: Node, start: Tensor, sign: int, *, is_warmup: bool) -> MergedBlock:
    update = await w.mean(w.x - start if sign > 0 else start - w.x)
    return MergedBlock(update, w.lr, is_warmup)


async def _late_blocks(
    w: Node, start: Tensor, period: int, warmup: int, sign: int
) -> AsyncIterator[MergedBlock]:
    late = LateMean(w, start, sign)
    await late.go_on()
    has_more = True
    while has_more:
        async for t in w.blocks(period, warmup):
            if t < warmup:
                yield await _merged_at_once(w, start, sign, is_warmup=True)
                w.x.copy_(start)
                late.begin_anew()
                continue
            moved = late.moved()
            if late.is_under_way:
                yield await late.take()
            w.x.copy_(start + moved)
            await late.send(moved)
            if w.is_changing:
                async for merged in late.rest():
                    yield merged
        async for merged in late.rest():
            yield merged
        has_more = await w.has_more()


class LateMean:
    """What one worker moved in the last block, and the mean of it, which is under way."""

    def __init__(self, w: Node, start: Tensor, sign: int) -> None:
        self._w, self._start, self._sign = w, start, sign
        self._sent = w.keep("sent", torch.zeros_like(w.x))
        so_far = torch.tensor([0.0, 0.0, w.samples, w.samples], dtype=torch.float64)
        numbers = w.keep("under way", so_far)
        self._flag, self._lr = numbers[:1], numbers[1:2]
        self._samples = numbers[2:]  # this worker's own when it was sent, and when the one before was
        self._coming: Operation[Tensor] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a mean was begun that is not taken."""
        return bool(self._flag)

    def moved(self) -> Tensor:
        """What this worker has moved since it sent what is under way."""
        return self._w.x - self._start - self._sent

    async def go_on(self) -> None:
        """Begin again what was under way when a checkpoint was written."""
        if self.is_under_way:
            await self._begin()

    def begin_anew(self) -> None:
        """Nothing is under way, and what this worker has done is merged."""
        self._sent.zero_()
        self._samples.fill_(self._w.samples)

    async def send(self, moved: Tensor) -> None:
        """Begin the mean of what this worker moved in a block."""
        self._sent.copy_(moved)
        self._flag.fill_(1)
        self._lr.fill_(self._w.lr)
        self._samples[1] = self._samples[0]
        self._samples[0] = self._w.samples
        await self._begin()

    async def take(self) -> MergedBlock:
        """Wait for the mean that is under way."""
        assert self._coming is not None, "what is under way was begun, or begun again"
        update, self._coming = await self._coming, None
        self._flag.zero_()
        return MergedBlock(update, float(self._lr), is_warmup=False)

    async def rest(self) -> AsyncIterator[MergedBlock]:
        """Wait for the mean that is under way, if there is one, and go on from where it leads."""
        if self.is_under_way:
            yield await self.take()
            self._w.x.copy_(self._start)
            self.begin_anew()

    async def _begin(self) -> None:
        weight = float(self._samples[0] - self._samples[1])
        self._coming = await self._w.begin(self._w.mean(self._sent * self._sign, weight))
