"""Block momentum (Chen & Huo 2016): the published tables, and the settings of our runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shoal.core.task import Data, Task
from shoal.programs.tasks import TASKS
from shoal.replicas.batches import steps_per_epoch
from shoal.strategies.bmuf import BMUF
from shoal.strategies.local import Local
from shoal.strategies.single import Single
from shoal.vocabulary.strategy import Strategy

SOURCE = (
    "Chen & Huo, Scalable training of deep learning machines by incremental block training with intra-block "
    "parallel optimization and blockwise model-update filtering (ICASSP 2016)"
)
SINGLE, AVERAGING, CLASSICAL, NESTEROV = "single", "averaging", "CBM", "NBM"
MERGING = (AVERAGING, CLASSICAL, NESTEROV)
COLLECTIVE = "rabenseifner"  # an MPI library's own choice for vectors of this length
MOMENTUM = {8: 0.9, 16: 0.94, 32: 0.97, 64: 0.986}  # of the paper; 1 - 1/N for other N


Case = tuple[str, int]
"""A method and its number of workers."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of tables 1, 2 and 3 of the paper."""

    wer: float  # word error rate on Eval2000, per cent
    speed_up: float


@dataclass(frozen=True)
class TimedRow(PublishedRow):
    """A row of tables 3 and 4 of the paper."""

    optimise: float  # minutes of a sweep over the data
    aggregate: float | None
    validate: float

    @property
    def minutes(self) -> float:
        """Minutes of a sweep in total."""
        return self.optimise + (self.aggregate or 0.0) + self.validate


DNN: Mapping[Case, TimedRow] = {  # 63 million parameters, 1,860 hours of speech
    (SINGLE, 1): TimedRow(14.0, 1.0, 2460.6, None, 22.5),
    (AVERAGING, 8): TimedRow(14.2, 7.3, 320.1, 16.5, 2.8),
    (AVERAGING, 16): TimedRow(14.8, 14.5, 159.9, 10.3, 1.4),
    (AVERAGING, 32): TimedRow(15.5, 28.7, 81.0, 4.7, 0.7),
    (CLASSICAL, 8): TimedRow(13.4, 7.3, 320.1, 17.2, 2.8),
    (CLASSICAL, 16): TimedRow(13.4, 14.4, 159.5, 11.3, 1.4),
    (CLASSICAL, 32): TimedRow(13.5, 28.4, 81.6, 5.0, 0.7),
    (NESTEROV, 8): TimedRow(13.3, 7.3, 319.8, 17.4, 2.8),
    (NESTEROV, 16): TimedRow(13.4, 14.4, 159.6, 11.9, 1.4),
    (NESTEROV, 32): TimedRow(13.4, 28.4, 81.5, 5.2, 0.7),
    (NESTEROV, 64): TimedRow(13.6, 56.2, 40.3, 3.5, 0.4),
}
CHUNKS: Mapping[Case, PublishedRow] = {  # a DBLSTM of 11.7 million, 309 hours, context-sensitive chunks
    (SINGLE, 1): PublishedRow(14.8, 1.0),
    (AVERAGING, 8): PublishedRow(15.4, 7.7),
    (AVERAGING, 16): PublishedRow(16.0, 15.3),
    (CLASSICAL, 8): PublishedRow(14.7, 7.7),
    (CLASSICAL, 16): PublishedRow(15.0, 15.3),
    (NESTEROV, 8): PublishedRow(14.9, 7.7),
    (NESTEROV, 16): PublishedRow(14.8, 15.3),
}
WHOLE: Mapping[Case, PublishedRow] = {  # the same on whole utterances
    (SINGLE, 1): PublishedRow(14.8, 1.0),
    (AVERAGING, 8): PublishedRow(15.6, 7.9),
    (AVERAGING, 16): PublishedRow(16.2, 15.8),
    (CLASSICAL, 8): PublishedRow(14.7, 7.9),
    (CLASSICAL, 16): PublishedRow(14.8, 15.8),
    (NESTEROV, 8): PublishedRow(14.5, 7.9),
    (NESTEROV, 16): PublishedRow(14.3, 15.8),
}


def published(task: str) -> tuple[int, Mapping[Case, PublishedRow]]:
    """The table of the paper that is closest to a task: its number and rows."""
    return {"speech-csc": (1, CHUNKS), "speech-dblstm": (2, WHOLE)}.get(task, (3, DNN))


@dataclass(frozen=True)
class MomentumSetting:
    """The task, batch size and block length that all methods and numbers of workers share."""

    task: Task
    data: Data
    period: int  # steps of a block

    @classmethod
    def of(cls, task: str, hidden: int | None, batch: int, period: int) -> MomentumSetting:
        """A task by name, with one hidden layer of this width or its own model, trained by plain SGD.

        Local momentum restarts with each block and so has little effect in short blocks, while a single
        worker would profit from all of it.
        """
        if period < 1:
            raise ValueError(f"period={period}: a block needs at least 1 step")
        chosen = replace(TASKS.make(task).but(batch=batch), optimizer=torch.optim.SGD)
        data = chosen.data()
        if hidden is not None:
            if data.x.ndim != 2 or data.y.ndim != 1 or data.y.is_floating_point():
                raise ValueError(
                    f"hidden={hidden} needs vectors with classes, which {task!r} lacks; take hidden=none"
                )
            sizes = data.x.shape[1], hidden, int(data.y.max()) + 1
            chosen = replace(chosen, model=partial(network, *sizes))
        return cls(chosen, data, period)

    @property
    def loaded(self) -> Task:
        """The task with its data in memory, for virtual time, which is one process."""
        return replace(self.task, data=lambda: self.data)

    @property
    def split(self) -> int:
        """Samples of a worker in a block."""
        return self.period * self.task.batch

    def partition(self, workers: int) -> str:
        """The N x M of the paper: workers, and blocks in a sweep."""
        steps = steps_per_epoch(len(self.data.x), self.task.batch, workers)
        return f"{workers} x {-(-steps // self.period)}" if workers > 1 else "–"

    def plenty(self, workers: int) -> float:
        """The number of samples over what the rule asks for, split times N squared."""
        return len(self.data.x) / (self.split * workers**2)

    def strategy(self, method: str, workers: int) -> Strategy:
        """A method of the tables, with the block momentum of the paper and no warm-up."""
        if method == SINGLE:
            return Single()
        if method == AVERAGING:
            return Local(period=self.period)
        momentum = MOMENTUM.get(workers)
        return BMUF(period=self.period, momentum=momentum, nesterov=method == NESTEROV, warmup=0)


def network(inputs: int, hidden: int, classes: int) -> nn.Module:
    """One hidden layer with ReLU."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
