"""Curve: the learning curve of a run. Snapshots are taken during the run and tested after it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task
from shoal.core.vector import trainable
from shoal.engine.engine import Engine, Instrument
from shoal.replicas.module import EnsembleModel
from shoal.runs.evaluation import Buffers, evaluate, load_mean_buffers
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Strategy

POINTS = 20
MOST_BYTES = 512 * 2**20

Counts: TypeAlias = "list[tuple[float, int]]"
"""Seconds since the run began, and the samples that a worker had computed gradients of by then."""


@dataclass
class Snapshot:
    """A copy of the model's parameters, or of a server's slice of them."""

    seconds: float  # since the run began
    samples: float  # merged into the model so far
    x: Tensor


class Curve(Instrument):
    """Copies the solution about `points` times a run, at the nodes that hold it.

    The copies are tested after the run, so that tests take none of its time. Of a large model there are fewer
    copies, to keep them below half a gigabyte. `samples` is the number of samples of the whole run.

    Where workers go at their own pace, none knows how many samples the others have done. There `counts` has
    how many each had done by when, for `count_all`.
    """

    def __init__(self, strategy: Strategy, samples: float, points: int = POINTS) -> None:
        self.snapshots: dict[int, list[Snapshot]] = {}  # by rank
        self.counts: defaultdict[int, Counts] = defaultdict(list)  # by rank
        self._own_pace = isinstance(strategy, Decentral) and not strategy.in_rounds
        self._strategy = strategy
        self._samples = samples
        self._began: dict[int, float] = {}
        self._points = points  # with 0, the end alone
        self._spacing = samples / max(1, points)
        self._next: defaultdict[int, float] = defaultdict(float if points else lambda: math.inf)

    def begin(self, engine: Engine, elapsed: float = 0.0, whole_bytes: int | None = None) -> None:
        """Take the first copy if this node holds the solution. The run began `elapsed` seconds ago.

        `whole_bytes` is the size of a model of which this node is a part: all parts are copied equally often.
        """
        self._began[engine.rank] = engine.channel.now() - elapsed
        if self._own_pace:
            self._count(engine)
        room = max(1, MOST_BYTES // max(1, whole_bytes or engine.x.nbytes))
        self._spacing = self._samples / max(1, min(self._points, room))
        if self._points and holds_solution(self._strategy, engine):
            self._take(engine)

    def step(self, engine: Engine) -> None:
        if self._own_pace:
            self._count(engine)
        self._look(engine)

    def update(self, engine: Engine) -> None:
        self._look(engine)

    def end(self, engine: Engine) -> None:
        """Take the last copy; call this only at a node that holds the solution."""
        taken = self.snapshots.setdefault(engine.rank, [])
        if taken and taken[-1].samples >= engine.merged:
            taken.pop()  # the last copy replaces one of the same number of samples
        self._take(engine)

    def _look(self, engine: Engine) -> None:
        if engine.merged >= self._next[engine.rank] and holds_solution(self._strategy, engine):
            self._take(engine)

    def _count(self, engine: Engine) -> None:
        """Note how many this worker has done; counts are as far apart as copies, but for the last."""
        counts, own = self.counts[engine.rank], engine.progress.samples
        if counts and own < counts[-1][1]:  # it was started again: what it did before does not count
            counts.clear()
        if len(counts) > 1 and own - counts[-2][1] < self._spacing / engine.identity.workers:
            counts.pop()
        counts.append((self._seconds(engine), own))

    def _seconds(self, engine: Engine) -> float:
        return engine.channel.now() - self._began[engine.rank]

    def _take(self, engine: Engine) -> None:
        seconds = self._seconds(engine)
        copy = self._strategy.solution(Node(engine)).detach().clone()
        self.snapshots.setdefault(engine.rank, []).append(Snapshot(seconds, engine.merged, copy))
        self._next[engine.rank] = engine.merged + self._spacing


def count_all(copies: Sequence[Snapshot], counts: Sequence[Counts]) -> list[Snapshot]:
    """The copies, each but the last with the samples of all workers by then: between counts as if evenly.

    Where no time passes, as in virtual time without durations, all workers are as far as the one that copies.
    """
    if not counts or copies[0].seconds == copies[-1].seconds:
        return list(copies)
    seconds = [copy.seconds for copy in copies[:-1]]
    done = sum(np.interp(seconds, *np.array(own).T) for own in counts)
    counted = [replace(c, samples=round(n)) for c, n in zip(copies, done, strict=False)]
    return [*(c for c in counted if c.samples < copies[-1].samples), copies[-1]]


def join_slices(slices: Sequence[Sequence[Snapshot]], independent: bool = False) -> list[Snapshot]:
    """Concatenate the snapshots of the nodes that hold the model, point by point; the last point is the end.

    The nodes are shards of a server, or with `independent` the members of an ensemble.
    """
    between = zip(*(own[:-1] for own in slices), strict=False)
    rows = [*between, tuple(own[-1] for own in slices)]
    merged = fmean if independent else min
    return [
        Snapshot(max(s.seconds for s in row), merged([s.samples for s in row]), torch.cat([s.x for s in row]))
        for row in rows
    ]


def put_together(
    strategy: Strategy,
    modules: Sequence[nn.Module],
    copies: Sequence[Sequence[Snapshot]],
    buffers: Sequence[Buffers],
    task: Task,
    data: Data,
    told: Callable[[int, int, dict[str, Any] | None], None],
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return the trained model and its learning curve.

    `modules` and `copies` are the modules and snapshots of the nodes that hold the solution, `buffers` are
    those of the workers. Testing may take a while: `told(tested, total, last point)` is called before each
    test.
    """
    model = modules[0]
    if strategy.independent:
        model = EnsembleModel(modules, classes=not data.y.is_floating_point())
    else:
        load_mean_buffers(model, buffers)
    points: list[dict[str, Any]] = []
    whole = join_slices(copies, strategy.independent)
    for number, snapshot in enumerate(whole):
        told(number, len(whole), points[-1] if points else None)
        points.append(score(snapshot, model, task, data))
    return model, points


def score(snapshot: Snapshot, model: nn.Module, task: Task, data: Data) -> dict[str, Any]:
    """Load a snapshot into `model` and test it. Returns a point of the learning curve."""
    parameters, layout = trainable(model)
    for p, value in zip(parameters, layout.split(snapshot.x).values(), strict=True):
        p.data.copy_(value)
    reached = evaluate(model, task, data)
    return {
        "seconds": snapshot.seconds,
        "samples": snapshot.samples,
        "test_loss": reached.loss,
        "test_accuracy": reached.accuracy,
        **({"metrics": reached.metrics} if reached.metrics else {}),
    }


def holders(strategy: Strategy, workers: int, shards: int, there: Sequence[int] = ()) -> list[int]:
    """The ranks that together hold the result: the shards of the first server, else worker 0.

    `there` are the ranks that are left at the end. For a strategy that survives the loss of workers, the
    first of them holds the result; for one with independent workers, all of them do.
    """
    if strategy.independent:
        return list(there or range(workers))
    if strategy.survives and there:
        return [min(there)]
    return list(range(workers, workers + shards)) if strategy.servers else [0]


def holds_solution(strategy: Strategy, engine: Engine) -> bool:
    """Whether this node believes that it holds the result of the run, or a slice of it."""
    if strategy.independent:
        return True
    if engine.membership is not None:
        return not engine.membership.is_joining and engine.rank == engine.membership.dealt[0]
    if strategy.survives:
        return all(engine.mailbox.has_lost(rank) for rank in range(engine.rank))
    return engine.rank in holders(strategy, engine.identity.workers, engine.identity.shards)
