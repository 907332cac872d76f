"""LoopData: what a loop reads through `shard`: which loader is its training data, and where it is in it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable

from shoal.engine.engine import Engine
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.passes import Passes


class LoopData:
    """The data of one worker's loop. `idle` takes a step without a batch, in which the others have one.

    Where the workers `average`, what each was dealt since the last average is remembered.
    """

    def __init__(
        self, engine: Engine, replica: AttachedReplica, idle: Callable[[], None], *, average: bool
    ) -> None:
        self._engine = engine
        self._averages = average
        self._replica = replica
        self._idle = idle
        self._first_kind: Hashable = None  # of loader: that of the training data
        self._number = -1  # of the last pass over the training data
        self._begun: Counter[Hashable] = Counter()  # passes over each kind of loader
        self._told_lost = 0  # batches
        self._seen: dict[int, object] = {}  # data sets by id, which is then nobody else's

    @property
    def passes(self) -> Passes:
        """Where the loop is in its training data."""
        return self._replica.passes

    @property
    def seat(self) -> tuple[int, int]:
        """Which share of how many this worker takes of what is dealt out."""
        me, members = self._engine.identity, self._engine.membership
        if members is None:
            return me.rank, me.workers
        return members.dealt.index(me.rank), len(members.dealt)

    @property
    def has_begun(self) -> bool:
        """Whether the loop has begun to read its training data."""
        return self._first_kind is not None

    def leads(self, kind: Hashable, dataset: object) -> bool:
        """Whether a loader is of the kind iterated first, whose batches are counted: the training data."""
        self._seen[id(dataset)] = dataset
        if self._first_kind is None:
            self._first_kind = kind
        return self._first_kind == kind

    def next_pass(self) -> int:
        """The number of the pass over the training data that begins now, with whatever seed."""
        self._number += 1
        return self._number

    def begin_pass(self, kind: Hashable) -> int:
        """How many passes over this kind of loader were begun before this one."""
        self._begun[kind] += 1
        return self._begun[kind] - 1

    def check_is_last(self, kind: Hashable, number: int) -> None:
        """Raise ValueError if another pass over this kind of loader was begun in the midst of that one."""
        if self._begun[kind] > number + 1:
            raise ValueError(
                "another pass over shoal.shard(loader) was begun in the midst of this one, as by "
                "next(iter(...)): it would count as an epoch, and its batches as trained on. Take a batch to "
                "look at from the loader itself; for a second reader of the same data say "
                "shoal.shard(loader, seed=1)"
            )

    def warn_of_loss(self, is_first: Callable[[], bool]) -> None:
        """After a step: have the first worker warn of batches that nobody can take again."""
        lost, self._told_lost = self.passes.lost - self._told_lost, self.passes.lost
        if lost and is_first():
            warnings.warn(
                f"{'1 batch' if lost == 1 else f'{lost} batches'} of workers that are gone will not be "
                "trained on: nobody else can read them again from a stream, from shares of a "
                "DistributedSampler, or from a pass that was over when the run was resumed",
                stacklevel=4,
            )

    def hand_out(self, samples: int) -> None:
        """The loop gets a batch of so many samples of its training data."""
        self._count()
        self._replica.saw(samples)

    def sit_out(self) -> None:
        """There is no batch for this worker in a step of the others.

        Workers that come and go stay in step, if a step takes one batch: then all know what each was dealt.
        """
        if self._engine.membership is not None and self.passes.batches == self._engine.progress.t:
            self._count()
            self._idle()

    def _count(self) -> None:
        progress, edges = self._engine.progress, self._engine.work.edges
        began = progress.block_began if edges is None else edges.block_began
        self.passes.take(progress.t, began if self._averages else progress.t)
