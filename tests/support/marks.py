"""A task that shows in its parameters how often every sample was learnt from."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task
from shoal.vocabulary.merged_blocks import merged_blocks
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

SAMPLES = 400
BATCH = 4
SECONDS = 0.004  # that a batch takes at least


def marks() -> Task:
    """Element i of the model falls by exactly 1 whenever sample i is learnt from, if batches are whole."""
    return Task(
        name="marks",
        model=Marks,
        data=data,
        loss=mean_output,
        lr=float(BATCH),  # a batch's gradient is 1 / BATCH for each of its samples
        batch=BATCH,
    )


def tallies() -> Task:
    """The same for batches of any size."""
    return replace(marks(), name="tallies", loss=summed_output, lr=1.0)


class Marks(nn.Module):
    """One number for each sample, 0 at first; the output is that of the sample asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.marks[index]


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    time.sleep(SECONDS)
    return output.mean()


def summed_output(output: Tensor, _: Tensor) -> Tensor:
    time.sleep(SECONDS)
    return output.sum()


def data() -> Data:
    index = torch.arange(SAMPLES)
    return Data(index, index, index[:1], index[:1])


@dataclass(frozen=True)
class Tally(Strategy):
    """Adds up what all workers bring, where model averaging would average it."""

    sends = Sends.DIFFERENCES
    period: int = 1

    async def worker(self, w):
        start = w.keep("start", w.x)
        async for _ in w.blocks(self.period):
            start.add_(await w.mean(w.x - start, weight=1.0), alpha=w.size)
            w.x.copy_(start)

    def solution(self, node):
        return node.keep("start", node.x)


class LateTally(Tally):
    """The same, one block late."""

    async def worker(self, w):
        start = w.keep("start", w.x)
        async for merged in merged_blocks(AlikeNode(w.engine), start, self.period, overlap=1):
            start.add_(merged.update, alpha=w.size)


class AlikeNode(Node):
    """A worker that counts as much as any other in a mean, however many samples it has."""

    def mean(self, v, weight=None, key=""):
        return super().mean(v, 1.0, key)


class GatheredTally(Tally):
    """The same, where every worker gets what every other one brings, and adds it up by itself."""

    async def worker(self, w):
        start = w.keep("start", w.x)
        async for _ in w.blocks(self.period):
            start.add_(await w.gather((w.x - start,), lambda given: sum(parts[0] for _, parts in given)))
            w.x.copy_(start)
