"""Gradients: what a replica computes, with its cost metered; peers are answered meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from shoal.core.errors import Diverged, advice_on_overflow
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Counted, NoMoreSteps, Replica, StepsAlone
from shoal.core.transport import offers
from shoal.engine.channel import Channel
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.engine.protocol import Handlers
from shoal.engine.underway import Background, attend_until

T = TypeVar("T")
CountedT = TypeVar("CountedT", bound=Counted)


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
        """One step of the replica's optimizer on the next batch; the replica has the loss checked before."""
        began = self._channel.now()
        count = await self._result(partial(cast(StepsAlone, self._replica).step, self._check))
        await self._count(count, began)

    async def next(self, handlers: Handlers | None = None) -> Tensor:
        """The gradient on the next batch at `x`. Raises NoMoreSteps when the user's loop has ended."""
        return (await self.computed(self._replica.gradient, handlers)).vector

    async def computed(
        self, compute: Callable[[], Coroutine[Any, Any, CountedT]], handlers: Handlers | None = None
    ) -> CountedT:
        """What a replica computes, metered.

        Raises Diverged when the loss is not finite, unless there is a server to refuse what comes of it.
        """
        began = self._channel.now()
        gradient = await self._result(compute, handlers)
        self._check(gradient.loss)
        await self._count(gradient.count, began, handlers)
        return gradient

    async def _result(
        self, compute: Callable[[], Coroutine[Any, Any, T]], handlers: Handlers | None = None
    ) -> T:
        """What comes of the computation. With handlers, messages are handled meanwhile."""
        try:
            work = self._apart(compute) if self._channel.counts_work else compute()
            return await (work if handlers is None else self._attentively(work, handlers))
        except NoMoreSteps:
            self._progress.end_data()
            raise

    async def _count(self, samples: int, began: float, handlers: Handlers | None = None) -> None:
        """Count a gradient and its time, after the virtual time that it takes has passed."""
        channel = self._channel
        if self.duration is not None:
            seconds = self.duration(samples)
            if handlers is not None and seconds:
                await self._mailbox.let_pass(channel.begin_work(seconds), handlers)
            elif handlers is not None or seconds:  # in no time, too, those who answer meanwhile take turns
                await channel.work(seconds)
        self._progress.count_gradient(samples)
        channel.meter.compute_seconds += channel.now() - began

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
        await attend_until(job.done, self._mailbox, handlers)
        return job.result()


class ComingGradient:
    """A gradient that is computed when it is awaited. Handed to a mean, it is merged while it is computed."""

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, Tensor]]) -> None:
        self._compute = compute

    def __await__(self) -> Generator[Any, Any, Tensor]:
        return self._compute().__await__()
