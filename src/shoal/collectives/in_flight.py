"""Averages in flight: a codec forms the average itself, by reductions of encoded data.

`Codec.average` is the program, and each codec's file says what it reduces. This file provides the reductions
for a run. Means use the collective that the run would use without a codec, sums any algorithm. Maxima, which
are short, take log2 P rounds, as in a butterfly. The first reduction also carries the weights.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from copy import copy
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

PREFIX = "+"
"""Before the tag of what a codec gives, so that it is no tag of a collective or of the protocol."""


class InFlight:
    """Averages by `Codec.average`, whose reductions use the collectives `mean` and `add_up`."""

    def __init__(self, mean: Mean, add_up: Sum) -> None:
        self._mean, self._add_up = mean, add_up

    def __copy__(self) -> InFlight:
        """For another worker: what forms the averages may hold memory of its own."""
        return InFlight(copy(self._mean), self._add_up)

    def prepare(self, group: Group) -> None:
        """Have the replica record the factors of its gradients, if the codec needs them.

        Raises ValueError if the model has no layer whose factors can be recorded.
        """
        codec = group.coding.codec
        if codec.needs_products and group.size > 1 and isinstance(group.replica, Records):
            group.replica.record()
            if not group.replica.recorded:
                raise ValueError(
                    f"{codec} compresses fully connected layers (nn.Linear), and this model has none; "
                    "take 'none', or a lossy codec such as 'low_rank'"
                )

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        return await self._average(group, v, weight, "")

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Exchange:
        """Begin an average in the background: in stripes, because the rounds of a reduction block.

        With a codec that needs all workers, `finish` does all the work.
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
            await workers.discard()
            return v.new_zeros(v.numel()), 0.0
        if state or after:
            coding.states[key] = after
        return average, total


class _Later:
    """An average that is formed in `finish`."""

    def __init__(self, form: Callable[[], Awaitable[tuple[Tensor, float]]]) -> None:
        self._form = form

    async def progress(self) -> None:
        """Do nothing: no part of the work can be done without waiting."""

    async def finish(self) -> tuple[Tensor, float]:
        """The average, and the total weight."""
        return await self._form()


class _NoWeight(Exception):
    """All weights are 0. Every worker raises this after the same reduction."""


class _GroupReductions:
    """The reductions of one average of `v`. The time between two of them is counted as encoding."""

    def __init__(self, group: Group, v: Tensor, weight: float, mean: Mean, add_up: Sum) -> None:
        self.size, self.weight, self.gives = group.size, weight, weight > PRESENT
        self._group, self._v, self._mean, self._add_up = group, v, mean, add_up
        self._total: float | None = None
        self._weights: list[float] | None = None  # of all workers, from the first `take` on
        self._own: dict[str, deque[Payload]] = defaultdict(deque)  # own payloads not yet taken, by tag
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
        """The recorded factors of the gradient; None if none are recorded or `v` is not of its length."""
        replica = self._group.replica
        if not self._group.coding.codec.needs_products or self._v.numel() != replica.x.numel():
            return None
        return replica if isinstance(replica, Records) and replica.recorded else None

    async def mean(self, v: Tensor) -> Tensor:
        """The weighted average, by the collective of this run, without further compression."""
        if v is self._v:
            self._compresses = False
        with self._reducing(v):
            average, total = await self._mean(self._group.uncompressed(v), v, self.weight)
        self._learn(total)
        return average

    async def largest(self, v: Tensor) -> Tensor:
        """The element-wise maximum, by recursive doubling. The weights are summed along with it."""
        load = _Largest(self._group, v, self.weight)
        with self._reducing(v):
            await swap(self._group, load)
        self._learn(load.weight)
        return load.held

    async def sum(self, v: Tensor) -> Tensor:
        """The sum, by the algorithm of this run. If the weights are unknown, an empty maximum goes first."""
        if self._total is None:
            await self.largest(v.new_empty(0, dtype=torch.float32))
        summed = v.clone()
        with self._reducing(v):
            await self._add_up(self._group, summed)
        return summed

    async def give(self, tag: str, parts: Payload) -> None:
        """Send `parts` to all other workers, with this worker's weight until all weights are known.

        Each worker sends to the next one first, so that not all send to worker 0 at once.
        """
        count = self.weight if self._weights is None else 0.0
        with self._reducing():
            for k in self._group.others:
                await self._group.send(k, Message(PREFIX + tag, parts, count=count))
        self._own[tag].append(parts)
        self._given += sum(part.nbytes for part in parts)

    async def take(self, tag: str) -> list[Given]:
        """Wait for the payloads and weights of all workers. Raises PeerLost as soon as any worker is lost."""
        group, taken = self._group, []
        if not self._own[tag]:
            raise RuntimeError(f"nothing was given as {tag!r} in this average, so nothing can be taken")
        own = Given(self._own[tag].popleft(), self.weight)
        with self._reducing():
            for k in range(group.size):
                if k == group.rank:
                    taken.append(own)
                else:
                    m = await group.take(PREFIX + tag, k)
                    taken.append(Given(m.parts, m.count))
        if self._weights is None:
            self._weights = [given.weight for given in taken]
            self._learn(sum(self._weights))
        return [Given(given.parts, w) for given, w in zip(taken, self._weights, strict=True)]

    async def discard(self) -> None:
        """Take what was given and not yet taken, and drop it: the next average must not find it."""
        for tag, given in self._own.items():
            for _ in given:
                for k in self._group.others:
                    await self._group.take(PREFIX + tag, k)

    async def finish(self) -> float:
        """Meter the completed average, and return the total weight."""
        group = self._group
        if left := [tag for tag, given in self._own.items() if given]:
            raise RuntimeError(
                f"{group.coding.codec} gave {', '.join(left)} to the workers and never took it"
            )
        if self._total is None:
            await self.largest(self._v.new_empty(0, dtype=torch.float32))
        group.meter.decode_seconds += group.now() - self._since
        is_priced = bool(self._given) or not isinstance(self._mean, Native)
        if self._compresses and is_priced:  # the cost of a byte in a transport's own all-reduce is unknown
            coding = group.coding
            coded = (group.size - 1) * self._given + coding.averaging(self._reduced)
            coding.weigh(coding.averaging(self._v.nbytes), coded)
        return self.total

    def _learn(self, total: float) -> None:
        """Store the total weight, which the first reduction yields. Raises _NoWeight if it is 0."""
        if self._total is None:
            self._total = total
            if not total:
                raise _NoWeight

    @contextmanager
    def _reducing(self, v: Tensor | None = None) -> Iterator[None]:
        """Do not count the time inside as encoding; count the bytes of `v` as reduced."""
        meter, now = self._group.meter, self._group.now
        meter.encode_seconds += now() - self._since
        if v is not None:
            self._reduced += v.nbytes
        try:
            yield
        finally:
            self._since = now()


class _Largest:
    """A load: the element-wise maximum so far, and the sum of the weights."""

    def __init__(self, group: Group, v: Tensor, weight: float) -> None:
        self.held, self.weight = v, weight
        self._group = group

    async def give(self, dst: int, tag: str) -> None:
        """Send the maximum and the weight."""
        await self._group.send(dst, Message(tag, (self.held,), count=self.weight))

    async def add(self, src: int, tag: str) -> None:
        """Take the larger of each pair of elements; NaN propagates."""
        theirs, weight = await self._take(src, tag)
        self.held, self.weight = torch.maximum(self.held, theirs), self.weight + weight

    async def replace(self, src: int, tag: str) -> None:
        """Replace both by those of worker `src`."""
        self.held, self.weight = await self._take(src, tag)

    async def _take(self, src: int, tag: str) -> tuple[Tensor, float]:
        m = await self._group.take(tag, src)
        (theirs,) = expect(m.parts, (self.held.dtype, self.held.numel()))
        return theirs.to(self.held.device), m.count
