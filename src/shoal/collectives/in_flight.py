"""Averages in flight: a codec forms them itself, out of reductions of what travels.

`Codec.average` is the program, and a codec's own file says what it reduces. Here is what carries it out in a
run: averages by the collective that would be chosen without a codec, and sums by any way to sum. Maxima,
which are short, travel in log2 P rounds, as in a butterfly. The weights travel with the first of these.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shoal.collectives.average import Sum
from shoal.collectives.butterfly import swap
from shoal.collectives.native import Native
from shoal.collectives.stripes import stripes
from shoal.core.averaging import Given
from shoal.core.codec import Payload, expect
from shoal.core.products import Records
from shoal.core.transport import Message
from shoal.engine.group import PRESENT, Exchange, Group, Mean


class InFlight:
    """Averages by the codec's own program; `mean` and `add_up` are how it reduces."""

    def __init__(self, mean: Mean, add_up: Sum) -> None:
        self._mean, self._add_up = mean, add_up

    def prepare(self, group: Group) -> None:
        """Have a worker's replica keep what its gradients are made of, if the codec asks for it."""
        codec = group.coding.codec
        if codec.needs_products and group.size > 1 and isinstance(group.replica, Records):
            group.replica.record()
            if not group.replica.recorded:
                raise ValueError(
                    f"{codec} is for fully connected layers (nn.Linear), which this model has none of; "
                    "take 'none', or a codec that loses something, as 'low_rank'"
                )

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        return await self._average(group, v, weight, "")

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Exchange:
        """Begin an average for later: in stripes, for here rounds have to wait for each other.

        With a codec that needs all workers, all of it is done when it is needed.
        """
        if group.coding.codec.needs_all:
            return _Later(partial(self._average, group, v.clone(), weight, key))
        return await stripes.start(group, v, weight, number, key)

    async def _average(self, group: Group, v: Tensor, weight: float, part: str) -> tuple[Tensor, float]:
        coding = group.coding
        codec = coding.fitted(0 if v.numel() == group.x.numel() else None, v.numel())
        key = codec.stream_key(v.numel(), part)
        state = coding.state_of(key, codec, v)
        workers = _GroupReductions(group, v, weight, self._mean, self._add_up)
        try:
            average, after = await codec.average(v, state, workers)
            total = await workers.finish()
        except _NoWeight:
            return v.new_zeros(v.numel()), 0.0
        if state or after:
            coding.states[key] = after
        return average, total


class _Later:
    """An average that is formed when it is needed."""

    def __init__(self, form: Callable[[], Awaitable[tuple[Tensor, float]]]) -> None:
        self._form = form

    async def progress(self) -> None:
        """Nothing can be done without waiting."""

    async def finish(self) -> tuple[Tensor, float]:
        """The average, and the total weight."""
        return await self._form()


class _NoWeight(Exception):
    """All weights are 0; every worker learns that from the same reduction."""


class _GroupReductions:
    """The reductions of one average of `v`. What passes between two of them is time to encode."""

    def __init__(self, group: Group, v: Tensor, weight: float, mean: Mean, add_up: Sum) -> None:
        self.size, self.weight, self.gives = group.size, weight, weight > PRESENT
        self._group, self._v, self._mean, self._add_up = group, v, mean, add_up
        self._total: float | None = None
        self._weights: list[float] | None = None  # of all workers, from the first `take` on
        self._own: dict[str, deque[Payload]] = defaultdict(deque)  # what was given and not yet taken, by tag
        self._reduced = self._given = 0  # bytes
        self._compresses = True
        self._since = group.now()

    @property
    def total(self) -> float:
        """The sum of all weights."""
        if self._total is None:
            raise RuntimeError("the total weight is known after the first reduction; reduce something first")
        return self._total

    @property
    def records(self) -> Records | None:
        """What the gradient is made of, if that is recorded and `v` has its length."""
        replica = self._group.replica
        if not self._group.coding.codec.needs_products or self._v.numel() != replica.x.numel():
            return None
        return replica if isinstance(replica, Records) and replica.recorded else None

    async def mean(self, v: Tensor) -> Tensor:
        """By the collective of this run, which compresses nothing any further."""
        if v is self._v:
            self._compresses = False
        with self._reducing(v):
            average, total = await self._mean(self._group.uncompressed(), v, self.weight)
        self._learn(total)
        return average

    async def largest(self, v: Tensor) -> Tensor:
        """As in a butterfly, with the weights."""
        load = _Largest(self._group, v, self.weight)
        with self._reducing(v):
            await swap(self._group, load)
        self._learn(load.weight)
        return load.held

    async def sum(self, v: Tensor) -> Tensor:
        """By the run's way to sum; the weights, if they are not known, by an empty maximum before."""
        if self._total is None:
            await self.largest(v.new_empty(0, dtype=torch.float32))
        summed = v.clone()
        with self._reducing(v):
            await self._add_up(self._group, summed)
        return summed

    async def give(self, tag: str, parts: Payload) -> None:
        """To the next worker first, so that not all send to worker 0; with the weight until that is known."""
        count = self.weight if self._weights is None else 0.0
        with self._reducing():
            for k in self._group.others:
                await self._group.send(k, Message(tag, parts, count=count))
        self._own[tag].append(parts)
        self._given += sum(part.nbytes for part in parts)

    async def take(self, tag: str) -> list[Given]:
        """Raises PeerLost as soon as any worker is lost."""
        group, own, taken = self._group, self._own[tag].popleft(), []
        with self._reducing():
            for k in range(group.size):
                m = Message(tag, own, count=self.weight) if k == group.rank else await group.take(tag, k)
                taken.append(Given(tuple(part.to(self._v.device) for part in m.parts), m.count))
        if self._weights is None:
            self._weights = [given.weight for given in taken]
            self._learn(sum(self._weights))
        return [Given(given.parts, w) for given, w in zip(taken, self._weights, strict=True)]

    async def finish(self) -> float:
        """Account for the average, which is complete; the total weight."""
        group = self._group
        if self._total is None:
            await self.largest(self._v.new_empty(0, dtype=torch.float32))
        group.meter.decode_seconds += group.now() - self._since
        is_priced = bool(self._given) or not isinstance(self._mean, Native)
        if self._compresses and is_priced:  # nobody knows what bytes cost in a transport's own all-reduce
            coding = group.coding
            coded = (group.size - 1) * self._given + coding.averaging(self._reduced)
            coding.weigh(coding.averaging(self._v.nbytes), coded)
        return self.total

    def _learn(self, total: float) -> None:
        """The first reduction tells all weights together."""
        if self._total is None:
            self._total = total
            if not total:
                raise _NoWeight

    @contextmanager
    def _reducing(self, v: Tensor | None = None) -> Iterator[None]:
        """Meanwhile nothing is encoded; `v` is what is reduced."""
        meter, now = self._group.meter, self._group.now
        meter.encode_seconds += now() - self._since
        if v is not None:
            self._reduced += v.nbytes
        try:
            yield
        finally:
            self._since = now()


class _Largest:
    """A load: the largest of each element so far, and the sum of the weights."""

    def __init__(self, group: Group, v: Tensor, weight: float) -> None:
        self.held, self.weight = v, weight
        self._group = group

    async def give(self, dst: int, tag: str) -> None:
        """Send both."""
        await self._group.send(dst, Message(tag, (self.held,), count=self.weight))

    async def add(self, src: int, tag: str) -> None:
        """Take the larger of each, and not a number where either is none."""
        theirs, weight = await self._take(src, tag)
        self.held, self.weight = torch.maximum(self.held, theirs), self.weight + weight

    async def replace(self, src: int, tag: str) -> None:
        """Take what arrives."""
        self.held, self.weight = await self._take(src, tag)

    async def _take(self, src: int, tag: str) -> tuple[Tensor, float]:
        m = await self._group.take(tag, src)
        (theirs,) = expect(m.parts, (self.held.dtype, self.held.numel()))
        return theirs.to(self.held.device), m.count
