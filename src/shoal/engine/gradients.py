"""Gradients: what a replica computes, with its cost metered; peers are answered meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from shoal.core.errors import Diverged, advice_on_overflow
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Counted, NoMoreSteps, Replica, StepsAlone
from shoal.core.transport import offers
from shoal.engine.channel import Channel
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.engine.protocol import Handlers

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)
CountedT = TypeVar("CountedT", bound=Counted)

LOOK_SECONDS = 0.001
"""How often a node that waits for a message looks whether its gradient is there."""


class Underway(Protocol[Result]):
    """Work in another thread."""

    def done(self) -> bool:
        """Whether it is finished; never waits."""
        ...

    def result(self) -> Result:
        """Its result, or the exception that it raised."""
        ...


class Background(Protocol):
    """Starts work in another thread."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Underway[T]:
        """Begin it, and return at once."""
        ...


class Gradients:
    """Computes one worker's gradients.

    `duration` tells how many seconds of virtual time a gradient of so many samples takes. `background`
    computes one in another thread while this one answers messages.
    """

    def __init__(
        self,
        replica: Replica,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        progress: Progress,
        background: Background | None = None,
    ) -> None:
        self.duration: Callable[[int], float] | None = None
        self._replica = replica
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self._progress = progress
        self._background = background
        self.may_step = offers(type(replica), StepsAlone)
        """Whether `step` can be called: the replica takes a step without handing its gradient over."""

    async def step(self) -> None:
        """One step of the replica's optimizer on the next batch."""
        await self.computed(partial(cast(StepsAlone, self._replica).step, self._check))

    async def next(self, handlers: Handlers | None = None) -> Tensor:
        """The gradient on the next batch at `x`. Raises NoMoreSteps when the user's loop has ended."""
        return (await self.computed(self._replica.gradient, handlers)).vector

    async def computed(
        self, compute: Callable[[], Coroutine[Any, Any, CountedT]], handlers: Handlers | None = None
    ) -> CountedT:
        """What a replica computes, metered.

        Raises Diverged when the loss is not finite, unless there is a server to refuse what comes of it.
        """
        channel, progress = self._channel, self._progress
        began = channel.now()
        try:
            work = self._apart(compute) if channel.counts_work else compute()
            gradient = await (work if handlers is None else self._attentively(work, handlers))
        except NoMoreSteps:
            progress.end_data()
            raise
        self._check(gradient.loss)
        if self.duration is not None:
            seconds = self.duration(gradient.count)
            if handlers is not None and seconds:
                await self._mailbox.let_pass(channel.begin_work(seconds), handlers)
            elif handlers is not None or seconds:  # in no time, too, those who answer meanwhile take turns
                await channel.work(seconds)
        progress.count_gradient(gradient.count)
        channel.meter.compute_seconds += channel.now() - began
        return gradient

    def _check(self, loss: float | None) -> None:
        """Note the loss of a batch. Raises Diverged if it is not finite and no server refuses it."""
        if loss is None:
            return
        self._channel.meter.loss = loss
        if not math.isfinite(loss) and not self._identity.servers:
            raise Diverged(
                f"{self._identity.name}: the loss became {loss} at step {self._progress.t}. "
                f"{advice_on_overflow(self._replica.lr)}"
            )

    async def _apart(self, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work, whose time `duration` tells."""
        with self._channel.apart():
            return await compute()

    async def _attentively(self, work: Coroutine[Any, Any, T], handlers: Handlers) -> T:
        """The result of the work, while messages are handled; without a background, when it is done."""
        if self._background is None:
            result = await work
            await self._mailbox.attend(handlers, 0.0)
            return result
        job = self._background(work)
        while not job.done():
            await self._mailbox.attend(handlers, LOOK_SECONDS)
        return job.result()


class ComingGradient:
    """A gradient that is computed when it is awaited. Handed to a mean, it is merged while it is computed."""

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, Tensor]]) -> None:
        self._compute = compute

    def __await__(self) -> Generator[Any, Any, Tensor]:
        return self._compute().__await__()
