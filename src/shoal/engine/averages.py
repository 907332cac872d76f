"""Averages over all workers. They come to them together, each with a weight of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from torch import Tensor

from shoal.core.replica import NoMoreSteps, Replica
from shoal.core.transport import Message, offers
from shoal.engine.gradients import ComingGradient, Gradients
from shoal.engine.group import PRESENT, Exchange, Group, Mean, Prepares, Starts
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Formation, Membership
from shoal.engine.operation import Completion
from shoal.engine.progress import Progress
from shoal.engine.protocol import Attends, Contribution, DataEnded, Solution
from shoal.engine.streaming import Merges, Merging, Streamed, Streams

Merge: TypeAlias = Callable[[list[tuple[float, tuple[Tensor, ...]]]], Tensor]
"""What makes one vector of the (weight, parts) of all workers."""


class Averages:
    """One worker's part in the averages of all.

    A worker whose data has ended goes on with the others, with weight 0, until an average has no weight at
    all: then all have ended, and NoMoreSteps is raised. So nobody waits for a worker that has left.
    `ends_known` says that every worker knows beforehand how many steps it takes.
    """

    def __init__(
        self,
        mean: Mean,
        group: Group,
        mailbox: Mailbox,
        progress: Progress,
        gradients: Gradients,
        replica: Replica,
        *,
        ends_known: bool,
    ) -> None:
        self._mean = mean
        self._group = group
        self._mailbox = mailbox
        self._progress = progress
        self._gradients = gradients
        self._replica = replica
        self._ends_known = ends_known
        self.under_way: list[Exchange] = []  # begun, and not finished
        self.started = 0  # averages that were begun, to be finished later
        self.open = 0  # those of them that are not finished
        self.to_resume = 0  # those that were open in a checkpoint, to be begun again: their samples are taken
        self.membership: Membership | None = None  # where workers come and go
        self._all_ended = False
        self._number = 0  # of the averages so far, where ends are not known
        self._attending: dict[int, Message] = {}  # the last word of each other worker
        self._merges: bool | None = None  # whether gradients are merged while they are computed
        kind: Any = type(mean)
        if offers(kind, Prepares):
            cast(Prepares, mean).prepare(group)

    # -- forming an average --------------------------------------------------------------------

    async def mean(self, v: Tensor | Awaitable[Tensor], weight: float | None) -> Tensor:
        """The weighted average of `v`; the weight defaults to the samples since the last merge."""
        progress, group = self._progress, self._group
        if isinstance(v, ComingGradient) and weight is None and (merging := self._merging()) is not None:
            average, own, total = await self._merged(merging)
        else:
            vector, ended = await self._brought(v)
            if isinstance(v, Tensor):
                await self._see_who_attends(ended)
            own = progress.take_unmerged()
            mine = 0.0 if ended else (own or PRESENT) if weight is None else weight
            average, total = await self._agreed_on(partial(self._formed, vector, mine))
        self._end_if_all_have(total)
        progress.merge(round(total) if weight is None else own * group.size)
        return average

    async def gather(self, parts: tuple[Tensor, ...], merge: Merge, merges: bool) -> Tensor:
        """What `merge` makes of all workers' parts, each with the samples since its last merge.

        If it `merges`, those samples are in the model then.
        """
        ended = self._progress.has_ended and not self._progress.unmerged
        await self._see_who_attends(ended)
        weight = self._progress.unmerged or (0.0 if ended else PRESENT)
        merged, total = await self._agreed_on(partial(self._merged_from_all, parts, weight, merge))
        self._end_if_all_have(total)
        if merges:
            self._progress.take_unmerged()
            self._progress.merge(round(total))
        return merged

    async def _merged_from_all(
        self, parts: tuple[Tensor, ...], weight: float, merge: Merge
    ) -> tuple[Tensor, float]:
        group = self._group
        for rank in group.others:
            await group.send(rank, Contribution(parts=parts, count=weight))
        brought = {rank: await group.take("contribution", rank) for rank in group.others}
        device = self._replica.x.device
        given = {rank: (m.count, tuple(part.to(device) for part in m.parts)) for rank, m in brought.items()}
        given[group.rank] = (weight, parts)
        return merge([given[rank] for rank in sorted(given)]), sum(w for w, _ in given.values())

    async def _agreed_on(self, formation: Formation) -> tuple[Tensor, float]:
        """What comes of a formation, over those who are left when it is complete."""
        return await (formation() if self.membership is None else self.membership.form(formation))

    async def start(self, v: Tensor, weight: float | None, key: str) -> Completion[Tensor]:
        """Begin an average, to compute meanwhile; `v` may change afterwards."""
        progress, group = self._progress, self._group
        unmerged = 0.0 if self.to_resume else progress.take_unmerged()
        self.to_resume = max(0, self.to_resume - 1)
        if weight is None:
            weight = unmerged
        weight = weight or (0.0 if progress.has_ended else PRESENT)
        mean = cast(object, self._mean)
        self.started += 1
        self.open += 1
        if group.size == 1 or not isinstance(mean, Starts):
            return partial(self._later, v.clone(), weight)
        exchange: Exchange = await mean.start(group, v, weight, self.started, key)
        if self.membership is not None:
            again = partial(_begun, mean, group, v.clone(), weight, self.started, key)
            exchange = Repeatable(exchange, self.membership, group, again)
        self.under_way.append(exchange)
        return partial(self._finished, exchange)

    async def progress(self) -> None:
        """Let averages under way go on, without waiting for anybody."""
        for exchange in self.under_way:
            await exchange.progress()

    async def agree(self, solution: Tensor) -> None:
        """Once all have ended: take the solution of a worker that had data to the end.

        Those that ended earlier went on with a learning rate that their own schedule no longer changed.
        """
        if not self._all_ended:
            return
        if self.membership is None:
            agreed, _ = await self._agreed(solution)
        else:
            agreed, _ = await self.membership.form(partial(self._agreed, solution.clone()))
        if agreed is not solution:
            solution.copy_(agreed)

    async def _agreed(self, solution: Tensor) -> tuple[Tensor, float]:
        """The solution of a worker that had data to the end, and how many have it."""
        group, clock = self._group, self._progress.clock
        for rank in group.others:
            await group.send(rank, DataEnded(clock=clock))
        clocks = {rank: (await group.take("ended", rank)).clock for rank in group.others}
        clocks[group.rank] = clock
        last = max(sorted(clocks), key=clocks.__getitem__)
        for rank in sorted(clocks):
            if clocks[rank] == clocks[last]:
                continue
            if group.rank == last:
                await group.send(rank, Solution(parts=(solution,)))
            elif group.rank == rank:
                solution = (await group.take("solution", last)).body
        return solution, float(group.size)

    # -- the end of the data -------------------------------------------------------------------

    async def _see_who_attends(self, ended: bool) -> None:
        """Say whether this worker has data, where ends are not known. One without data waits for the others.

        Nobody may have any, and to average nothing is costly: then NoMoreSteps is raised.
        """
        group = self._group
        if self._ends_known or self.membership is not None:
            return
        self._number += 1
        others = [rank for rank in range(group.size) if rank != group.rank]
        for rank in others:
            await group.send(rank, Attends(seq=self._number, count=float(ended)))
        self._attending.update((m.src, m) for m in self._mailbox.poll("comes"))
        for rank in others if ended else ():
            while rank not in self._attending or self._attending[rank].seq < self._number:
                self._attending[rank] = await group.recv("comes", rank)
        if ended and all(self._attending[rank].count for rank in others):
            self._end_if_all_have(0.0)

    def _end_if_all_have(self, total: float) -> None:
        if total == 0 and self._progress.has_ended and self._group.size > 1:
            self._all_ended = True
            raise NoMoreSteps

    async def _brought(self, v: Tensor | Awaitable[Tensor]) -> tuple[Tensor, bool]:
        """What this worker brings to an average, and whether its data has ended."""
        if isinstance(v, Tensor):
            return v, self._progress.has_ended and not self._progress.unmerged
        try:
            return await v, False
        except NoMoreSteps:
            if self._group.size == 1:
                raise
            x = self._replica.x
            return x.new_zeros(x.numel()), True

    # -- averages that were begun --------------------------------------------------------------

    async def _later(self, v: Tensor, weight: float) -> Tensor:
        return self._taken(*await self._agreed_on(partial(self._formed, v, weight)))

    async def _formed(self, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The average over those who are in the group now, and the total weight."""
        return (v, weight) if self._group.size == 1 else await self._mean(self._group, v, weight)

    async def _finished(self, exchange: Exchange) -> Tensor:
        average, total = await exchange.finish()
        self.under_way.remove(exchange)
        return self._taken(average, total)

    def _taken(self, average: Tensor, total: float) -> Tensor:
        """An average that was begun, counted: of a part of the model, only that part is merged."""
        self.open -= 1
        self._end_if_all_have(total)
        self._progress.merge_part(total, average.numel(), self._replica.x.numel())
        return average

    # -- averages that are formed during back-propagation --------------------------------------

    async def _merged(self, merging: Merging) -> tuple[Tensor, float, float]:
        """The average of a gradient that is merged while it is computed; own and total weight."""
        progress, out = self._progress, merging.out
        try:
            gradient = await self._gradients.computed(partial(cast(Streams, self._replica).stream, merging))
        except NoMoreSteps:
            if self._group.size == 1:
                raise
            begun = merging.begun  # the loop ended after a back-propagation, whose gradient must not count
            gradient = Streamed(out if begun else out.zero_(), 0, None, changed=begun, fill=out.zero_)
        own = progress.take_unmerged()
        weight = own or (0.0 if progress.has_ended else PRESENT)
        average, total = await self._agreed_on(partial(merging.finish, gradient, weight))
        merging.settle(total)
        if total == 0 and self._group.size == 1:  # the others have gone meanwhile
            raise NoMoreSteps
        return average, own, total

    def _merging(self) -> Merging | None:
        """An average to be formed while the gradient is computed; None where that cannot be."""
        if self._merges is None:  # asked once: such questions are slow
            able = isinstance(cast(object, self._mean), Merges) and isinstance(self._replica, Streams)
            self._merges = able and (self._group.size > 1 or self.membership is not None)
        if not self._merges or self._progress.unmerged:
            return None
        return cast(Merges, self._mean).begin(self._group, cast(Streams, self._replica).parts)


async def _begun(mean: Starts, group: Group, v: Tensor, weight: float, number: int, key: str) -> Exchange:
    """An average that is begun among those who are left; of one worker it is exact, as any other."""
    return OwnAverage(v, weight) if group.size == 1 else await mean.start(group, v, weight, number, key)


@dataclass(frozen=True)
class OwnAverage:
    """The average of a worker that is alone."""

    v: Tensor
    weight: float

    async def progress(self) -> None:
        """There is nothing to do."""

    async def finish(self) -> tuple[Tensor, float]:
        """What the worker brought, and its weight."""
        return self.v, self.weight


class Repeatable:
    """An average under way that is begun again, from what this worker brought, if workers come or go.

    Others may come to it after that, and begin it among those who are left: so all send the same messages.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        group: Group,
        again: Callable[[], Awaitable[Exchange]],
    ) -> None:
        self._exchange = exchange
        self._membership = membership
        self._group = group
        self._again = again
        self._epoch = group.epoch

    @property
    def _is_valid(self) -> bool:
        return self._group.epoch == self._epoch

    async def progress(self) -> None:
        """Do what can be done without waiting."""
        if self._is_valid:
            await self._exchange.progress()

    async def finish(self) -> tuple[Tensor, float]:
        """The weighted average and the total weight."""
        return await self._membership.form(self._form)

    async def _form(self) -> tuple[Tensor, float]:
        if not self._is_valid:
            self._epoch = self._group.epoch
            self._exchange = await self._again()
        return await self._exchange.finish()
