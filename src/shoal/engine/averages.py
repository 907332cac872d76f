"""Meeting: averages over all workers, who come to them together, each with a weight of its own."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from torch import Tensor

from shoal.core.replica import NoMoreSteps
from shoal.core.transport import Message
from shoal.engine.client import Pending
from shoal.engine.streaming import Coming, Merges, Merging, Streamed, Streams

if TYPE_CHECKING:
    from shoal.vocabulary.node import Mean, Node

WORD = "comes"
"""Tag of what a worker says before an average: its number, and whether this worker's data has ended."""

PRESENT = 1e-30
"""The weight of a worker without samples that goes on: nothing beside one sample, and more than nothing."""


class Exchange(Protocol):
    """An average under way."""

    async def progress(self) -> None:
        """Do what can be done without waiting."""
        ...

    async def finish(self) -> tuple[Tensor, float]:
        """The weighted average and the total weight (zeros if that is 0), when all have come."""
        ...


@runtime_checkable
class Starts(Protocol):
    """A way to form averages that goes on while the worker does something else."""

    async def start(self, node: Node, v: Tensor, weight: float, number: int, key: str) -> Exchange:
        """Begin one; `v` may be changed afterwards. Every worker gives it the same number.

        What has the same key is compressed as one stream.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """A way to form averages that needs something of a node before its first gradient."""

    def prepare(self, node: Node) -> None:
        """See to it."""
        ...


class Meeting:
    """One worker's part in the averages of all.

    A worker whose data has ended goes on with the others, with weight 0, until an average has no weight at
    all: then all have ended, and NoMoreSteps is raised. So nobody waits for one that has left.
    """

    def __init__(self, node: Node, mean: Mean) -> None:
        self._node = node
        self._mean = mean
        self._under_way: list[Exchange] = []
        self._started = 0
        self._all_ended = False
        self._numbers = 0  # of the averages so far, where ends are not known beforehand
        self._words: dict[int, Message] = {}  # the last of each other worker
        self._merges: bool | None = None  # whether gradients are merged while they are computed
        if isinstance(preparing := cast(object, mean), Prepares):
            preparing.prepare(node)

    async def mean(self, v: Tensor | Awaitable[Tensor], weight: float | None) -> Tensor:
        """See `Node.mean`."""
        node = self._node
        if isinstance(v, Coming) and weight is None and (merging := self._merging()) is not None:
            average, own, total = await self._merged(merging)
        else:
            average, ended = await self._brought(v)
            if node.last_step is None and isinstance(v, Tensor):
                await self._see_who_comes(ended)
            own = total = node.take_unmerged()
            if node.size > 1:
                mine = 0.0 if ended else (own or PRESENT) if weight is None else weight
                average, total = await self._mean(node, average, mine)
        self._end_if_all_have(total)
        node.merged += round(total) if weight is None else own * node.size
        return average

    async def start(self, v: Tensor, weight: float, key: str) -> Pending[Tensor]:
        """See `Node.start_mean`."""
        node = self._node
        node.take_unmerged()
        weight = weight or (0.0 if node.has_ended else PRESENT)
        mean = cast(object, self._mean)
        if node.size == 1 or not isinstance(mean, Starts):
            return Pending(partial(self._later, v.clone(), weight))
        self._started += 1
        exchange = await mean.start(node, v, weight, self._started, key)
        self._under_way.append(exchange)
        return Pending(partial(self._finished, exchange))

    async def progress(self) -> None:
        """Let averages under way go on, without waiting for anybody."""
        for exchange in self._under_way:
            await exchange.progress()

    async def agree(self, solution: Tensor) -> None:
        """Once all have ended: take the solution of one that had data to the end.

        Who ended before went on with a learning rate that its own schedule did not change any more.
        """
        node = self._node
        if not self._all_ended:
            return
        others = [rank for rank in range(node.size) if rank != node.rank]
        for rank in others:
            await node.send(rank, Message("ended", clock=node.clock))
        clocks = {rank: (await node.recv("ended", src=rank)).clock for rank in others}
        clocks[node.rank] = node.clock
        last = max(sorted(clocks), key=clocks.__getitem__)
        for rank in sorted(clocks):
            if clocks[rank] == clocks[last]:
                continue
            if node.rank == last:
                await node.send(rank, Message("solution", (solution,)))
            elif node.rank == rank:
                solution.copy_((await node.recv("solution", src=last)).body)

    async def _see_who_comes(self, ended: bool) -> None:
        """Say whether this worker has data; if not, wait for the others' words: to average nothing is costly.

        Raises NoMoreSteps when nobody has. Who has data does not wait for anybody.
        """
        node = self._node
        self._numbers += 1
        others = [rank for rank in range(node.size) if rank != node.rank]
        for rank in others:
            await node.send(rank, Message(WORD, seq=self._numbers, count=float(ended)))
        self._words.update((m.src, m) for m in node.poll(WORD))
        for rank in others if ended else ():
            while rank not in self._words or self._words[rank].seq < self._numbers:
                self._words[rank] = await node.recv(WORD, src=rank)
        if ended and all(self._words[rank].count for rank in others):
            self._end_if_all_have(0.0)

    def _end_if_all_have(self, total: float) -> None:
        if total == 0 and self._node.has_ended and self._node.size > 1:
            self._all_ended = True
            raise NoMoreSteps

    async def _later(self, v: Tensor, weight: float) -> Tensor:
        alone = self._node.size == 1
        return self._taken(*((v, weight) if alone else await self._mean(self._node, v, weight)))

    async def _finished(self, exchange: Exchange) -> Tensor:
        average, total = await exchange.finish()
        self._under_way.remove(exchange)
        return self._taken(average, total)

    def _taken(self, average: Tensor, total: float) -> Tensor:
        """An average that was started, accounted for: of a part of the model, only that part is merged."""
        self._end_if_all_have(total)
        node = self._node
        part, whole = average.numel(), node.x.numel()
        if part == whole:
            node.merged += round(total)
        else:  # by elements, which are whole numbers: when all parts are in, so is every sample
            node.merged = (round(node.merged * whole) + round(total) * part) / whole
        return average

    async def _brought(self, v: Tensor | Awaitable[Tensor]) -> tuple[Tensor, bool]:
        """What this worker brings to an average, and whether its data has ended."""
        node = self._node
        if isinstance(v, Tensor):
            return v, node.has_ended and not node.unmerged
        try:
            return await v, False
        except NoMoreSteps:
            if node.size == 1:
                raise
            return node.x.new_zeros(node.x.numel()), True

    async def _merged(self, merging: Merging) -> tuple[Tensor, float, float]:
        """The average of a gradient that is merged while it is computed; own and total weight."""
        node, out = self._node, merging.out
        try:
            gradient = await node.computed(partial(cast(Streams, node.replica).stream, merging))
        except NoMoreSteps:
            begun = merging.begun  # the loop ended after a back-propagation, whose gradient is not to count
            gradient = Streamed(out if begun else out.zero_(), 0, None, changed=begun, fill=out.zero_)
        own = node.take_unmerged()
        average, total = await merging.finish(gradient, own or (0.0 if node.has_ended else PRESENT))
        return average, own, total

    def _merging(self) -> Merging | None:
        """An average to be formed while the gradient is computed; None where that cannot be."""
        node = self._node
        if self._merges is None:  # asked once: such questions take their time
            able = isinstance(cast(object, self._mean), Merges) and isinstance(node.replica, Streams)
            self._merges = node.size > 1 and able
        if not self._merges or node.unmerged:
            return None
        return cast(Merges, self._mean).begin(node, cast(Streams, node.replica).parts)
