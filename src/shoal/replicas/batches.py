"""Batches: one worker's share of the training data, step by step."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.core.growth import Growth
from shoal.core.replica import LastDeal
from shoal.core.seeds import derive, stream


@dataclass(frozen=True)
class DataPosition:
    """Where all workers stand in the data before a step: in which epoch, with so many samples of it taken."""

    step: int = 0
    epoch: int = 0
    taken: int = 0


def steps_per_epoch(samples: int, batch: int, workers: int) -> int:
    """Steps of each worker for one pass over the data, the same for all workers.

    A remainder too small to give every worker a sample joins the last batches. Raises ValueError if there are
    fewer samples than workers.
    """
    if samples < workers:
        raise ValueError(
            f"{samples} samples cannot be shared among {workers} workers; every one needs at least 1"
        )
    return max(1, -(-(samples - workers + 1) // (batch * workers)))


def share(
    order: Tensor,
    step: int,
    batch: int,
    rank: int,
    workers: int,
    last: bool,
    speeds: Sequence[float] | None = None,
) -> Tensor:
    """The samples of one worker in one step: every `workers`-th, or with `speeds` a share by its speed.

    The last step of an epoch takes the remainder.
    """
    taken = batch * workers
    these = order[step * taken : None if last else (step + 1) * taken]
    if speeds is None:
        return these[rank::workers]
    return torch.split(these, apportion(len(these), speeds))[rank]


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers, at least 1 each, in proportion to the weights.

    Uses the largest-remainder method.
    """
    scale = total / sum(weights)
    above_one = [max(0.0, weight * scale - 1) for weight in weights]
    spare = total - len(weights)
    quotas = [part * spare / (sum(above_one) or 1.0) for part in above_one]
    parts = [int(quota) for quota in quotas]
    short = sorted(range(len(parts)), key=lambda k: parts[k] - quotas[k])[: spare - sum(parts)]
    return [1 + part + (k in short) for k, part in enumerate(parts)]


class Batches:
    """One worker's share of the data: a fresh shuffle for every epoch, the same for all workers.

    Step s of an epoch takes the next `batch * workers` samples of the shuffle; worker k gets every
    `workers`-th of them, from the k-th on. So all shares differ by at most one sample at every step.
    With `fixed` shares worker k always gets the same samples, every `workers`-th of the first shuffle, in a
    fresh order for every epoch, cut into batches of about the same size. After a call of `weigh`, steps are
    divided by the workers' speeds. With `begin`, these workers go on where others stopped; the step before
    `end` takes all samples up to there.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch: int,
        rank: int,
        workers: int,
        seed: int,
        fixed: bool = False,
        growth: Growth | None = None,
        begin: DataPosition | None = None,
        end: DataPosition | None = None,
    ) -> None:
        self._x, self._y = x, y
        self._batch, self._rank, self._workers, self._seed = batch, rank, workers, seed
        self._fixed = fixed
        self._growth = growth or Growth()
        self.steps_per_epoch = steps_per_epoch(len(x), batch, workers)  # until the batch grows
        self._begin, self._end = begin or DataPosition(), end
        self._again = torch.empty(
            0, dtype=torch.int64
        )  # samples of the first epoch that come before its rest
        self._done: dict[int, Tensor] = {}  # by epoch: samples that are in the model out of their turn
        self._former: Batches | None = None  # how the batches before the first were dealt, where that matters
        self._was: Sequence[int | None] = ()  # the place there of each worker
        self._begins = [self._begin.step]  # the position at which each epoch begins, from the first one on
        self.position = self._begin.step  # batches taken so far, those of workers before these included
        self.rate = 1.0  # factor of the learning rate for the batch taken last
        self._detour: tuple[int, int] | None = None
        self._speeds: Sequence[float] | None = None
        self._share: tuple[tuple[int, int, int], Tensor] | None = None  # the fixed one asked for last, whose

    def weigh(self, speeds: Sequence[float]) -> None:
        """From now on divide a step's samples in proportion to `speeds`, one for each worker."""
        self._speeds = speeds

    def seek(self, owner: int, place: int) -> None:
        """Continue from batch `place` of this worker's share, or take that one batch of another worker's."""
        if owner == self._rank:
            self.position, self._detour = place, None
        else:
            self._detour = owner, place

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; never ends."""
        rank, position = self._detour or (self._rank, self.position)
        if self._detour is None:
            self.position += 1
        self._detour = None
        self.rate = self._growth.rate(self._batch, self._find(position)[0])
        index = self._indices(rank, position)
        return self._x[index], self._y[index]

    def _indices(self, rank: int, position: int) -> Tensor:
        """The samples of one batch of one worker."""
        if position < self._begin.step:
            return self._dealt_before(rank, position)
        epoch, step, steps = self._find(position)
        if self._has_shares(epoch):
            return part_of(self._own(rank, epoch), step, steps)
        ends = self._end is not None and position == self._end.step - 1
        return self._share_of(self._order(epoch, self._stop(epoch) if ends else None), rank, position, ends)

    def _share_of(self, order: Tensor, rank: int, position: int, ends: bool = False) -> Tensor:
        """What one batch of one worker takes of the order of its epoch."""
        epoch, step, steps = self._find(position)
        batch = self._growth.batch(self._batch, epoch)
        is_last = ends or step == steps - 1
        return share(order, step, batch, rank, self._workers, is_last, self._speeds)

    def _order(self, epoch: int, stop: int | None = None) -> Tensor:
        """The samples of an epoch that these workers take, in order."""
        left = self._data(epoch)[self._taken(epoch) : stop]
        return torch.cat([self._again, left]) if self._comes_again(epoch) else left

    def _data(self, epoch: int) -> Tensor:
        """The samples of an epoch, in order, but for those that are in the model out of their turn."""
        return without(_shuffle(len(self._x), self._seed, epoch), self._done.get(epoch))

    def _comes_again(self, epoch: int) -> int:
        """How many samples of an epoch were dealt before to workers that did not contribute them."""
        return len(self._again) if epoch == self._begin.epoch else 0

    # -- dealing to other workers than before --------------------------------------------------

    def redeal(self, place: int, workers: int, step: int, last: LastDeal) -> None:
        """From `step` on deal to so many workers, of whom this is number `place`."""
        undone = [self._indices(k, p) for k, steps in last.undone.items() for p in steps]
        former = None if last.was is None else copy.copy(self)
        ahead = {(k, p) for k, steps in last.done.items() for p in steps}
        epoch, taken, again, skipped = self._left_at(step if last.end is None else min(step, last.end), ahead)
        self._done, again = skipped, torch.cat([again, *undone])
        if self._fixed and not taken and len(again):  # there are no shares beside others' samples
            taken, again = len(self._x), torch.cat([again, self._data(epoch)])
        if self._fixed and taken:
            self._done.pop(epoch, None)
        if taken >= len(self._data(epoch)) and not len(again):
            epoch, taken = epoch + 1, 0
        self._begin, self._again = DataPosition(step, epoch, taken), again
        self._former, self._was = former, last.was or ()
        self._begins = [step]
        self._rank, self._workers, self.position = place, workers, step

    def _left_at(self, step: int, ahead: Set[tuple[int, int]]) -> tuple[int, int, Tensor, dict[int, Tensor]]:
        """What is left before a step, but for batches that are ahead, by place and position.

        Epoch, samples of it that are taken, those that come before the rest, and by epoch those left out.
        """
        kept, skipped = self._without(ahead)
        epoch, taken, again = self._begin.epoch, self._begin.taken, self._again
        if step == self._begin.step:
            return epoch, taken, again[kept], skipped
        epoch, last, steps = self._find(step - 1)
        if self._has_shares(epoch):
            end = step + steps - last - 1
            rest = [(k, p) for p in range(step, end) for k in range(self._workers) if (k, p) not in ahead]
            left = torch.cat([self._again[:0], *(self._indices(k, p) for k, p in rest)])
            return epoch, len(self._x), left, skipped
        count = (last + 1) * self._growth.batch(self._batch, epoch) * self._workers
        dealt = len(self._order(epoch)) if last + 1 == steps else count
        taken = self._taken(epoch) + max(0, dealt - self._comes_again(epoch))
        first = min(len(again), dealt) if epoch == self._begin.epoch else len(again)
        return epoch, taken, again[first:][kept[first:]], skipped

    def _has_shares(self, epoch: int) -> bool:
        """Whether each worker has its own share of an epoch, which was not dealt to others in part."""
        return self._fixed and not self._taken(epoch)

    def _without(self, ahead: Set[tuple[int, int]]) -> tuple[Tensor, dict[int, Tensor]]:
        """Leave out the batches of these places and positions.

        Returns which of the samples that come again are left, and by epoch which of the others are not.
        """
        kept = torch.ones(len(self._again), dtype=torch.bool)
        skipped: dict[int, list[Tensor]] = {e: [ids] for e, ids in self._done.items()}
        for k, position in ahead:
            epoch = self._find(position)[0]
            if self._has_shares(epoch):
                skipped.setdefault(epoch, []).append(self._indices(k, position))
                continue
            order, first = self._order(epoch), self._comes_again(epoch)
            places = self._share_of(torch.arange(len(order)), k, position)
            kept[places[places < first]] = False
            skipped.setdefault(epoch, []).append(order[places[places >= first]])
        return kept, {epoch: torch.cat(ids) for epoch, ids in skipped.items()}

    def _dealt_before(self, rank: int, position: int) -> Tensor:
        """The samples of a batch before this deal began; none for a worker that was not there."""
        place = self._was[rank] if self._former is not None else None
        if self._former is None or place is None:
            return torch.empty(0, dtype=torch.int64)
        return self._former._indices(place, position)

    def end_of(self, passes: int) -> int:
        """The step after the last of so many passes over the data."""
        while self._begin.epoch + len(self._begins) - 1 < passes:
            self._find(self._begins[-1])
        return self._begins[max(0, passes - self._begin.epoch)]

    def deal(self) -> dict[str, Any] | None:
        """What has been dealt so far, as plain values; `take_deal` goes on from it.

        None where it ends at a step: then it is dealt to one number of workers.
        """
        if self._end is not None:
            return None
        here = self._begin
        return {
            "begin": [here.step, here.epoch, here.taken],
            "again": self._again,
            "workers": self._workers,
            "done": dict(self._done),
            "former": None if self._former is None else self._former.deal(),
            "was": list(self._was),
        }

    def take_deal(self, deal: dict[str, Any]) -> None:
        """Go on from what another worker's `deal` gave."""
        self._begin, self._again = DataPosition(*deal["begin"]), deal["again"]
        self._workers, self._begins = deal["workers"], [self._begin.step]
        self._done, self._was, self._former = deal["done"], deal["was"], None
        if deal["former"] is not None:
            self._former = copy.copy(self)
            self._former.take_deal(deal["former"])

    # -- inside --------------------------------------------------------------------------------

    def _taken(self, epoch: int) -> int:
        """Samples of an epoch that others have taken before these workers."""
        return self._begin.taken if epoch == self._begin.epoch else 0

    def _stop(self, epoch: int) -> int | None:
        """How many samples of the last epoch have been taken after the last step; None for all."""
        return self._end.taken if self._end is not None and self._end.epoch == epoch else None

    def _find(self, position: int) -> tuple[int, int, int]:
        """The epoch of a batch, its index in the epoch, and the number of batches in the epoch."""
        first = self._begin.epoch
        while self._begins[-1] <= position:
            epoch = first + len(self._begins) - 1
            batch = self._growth.batch(self._batch, epoch)
            whole = len(self._x) - len(self._done.get(epoch, ()))
            left = whole - self._taken(epoch) + self._comes_again(epoch)
            few = left < self._workers and (epoch == self._begin.epoch or epoch in self._done)
            steps = min(1, left) if few else steps_per_epoch(left, batch, self._workers)  # some get no sample
            self._begins.append(self._begins[-1] + steps)
        k = bisect_right(self._begins, position) - 1
        return first + k, position - self._begins[k], self._begins[k + 1] - self._begins[k]

    def _own(self, rank: int, epoch: int) -> Tensor:
        """The fixed share of a worker, in the order of this epoch."""
        whose = rank, self._workers, epoch
        if self._share is None or self._share[0] != whose:
            mine = _shuffle(len(self._x), self._seed, 0)[rank :: self._workers]
            order = _shuffle(len(mine), derive(self._seed, "share", rank), epoch)
            self._share = whose, mine[order]
        return without(self._share[1], self._done.get(epoch))


def part_of(samples: Tensor, number: int, parts: int) -> Tensor:
    """One of so many parts of about the same size, the longer first, as `torch.tensor_split` cuts them."""
    size, longer = divmod(len(samples), parts)
    begin = number * size + min(number, longer)
    return samples[begin : begin + size + (number < longer)]


def without(samples: Tensor, some: Tensor | None) -> Tensor:
    """The samples that are not among some, in order."""
    return samples if some is None else samples[~torch.isin(samples, some)]


@lru_cache(maxsize=4)
def _shuffle(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=stream(seed, "data", epoch))
