"""Node: the verbs that an algorithm may use. docs/extending.md lists them, and nothing else is here.

A verb that may wait is `async` or returns an `Operation`, so every `await` in an algorithm marks a point
where others may act. Nothing here knows which driver completes the awaits. All state is in the engine's
parts; a node is a face of them.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import TypeVar, overload

from torch import Tensor

from shoal.core.errors import Diverged, advice_on_overflow
from shoal.core.identity import SERVER
from shoal.core.replica import NoMoreSteps, Parameters
from shoal.core.transport import Message
from shoal.engine.averages import Merge
from shoal.engine.gradients import ComingGradient
from shoal.engine.operation import Operation
from shoal.engine.protocol import Handlers, Push
from shoal.engine.work import HELP
from shoal.vocabulary.serving import Serving

T = TypeVar("T")


class Node(Serving):
    """A worker (rank below `size`) or a server (rank `size` and up) of a run."""

    @property
    def lr(self) -> float:
        """The learning rate of the next local step."""
        return self.engine.replica.lr

    @property
    def t(self) -> int:
        """Steps done."""
        return self.engine.progress.t

    @property
    def samples(self) -> int:
        """Samples that this worker has computed gradients of."""
        return self.engine.progress.samples

    @property
    def unmerged(self) -> float:
        """Samples of this worker since its last mean or push."""
        return self.engine.progress.unmerged

    @property
    def compute_seconds(self) -> float:
        """Seconds that this worker has computed, in gradients and steps."""
        return self.engine.channel.meter.compute_seconds

    @property
    def incarnation(self) -> int:
        """How often this node was restarted after a crash."""
        return self.engine.identity.incarnation

    # -- local work ----------------------------------------------------------------------------

    async def steps(self, until: int | None = None) -> AsyncIterator[int]:
        """Numbers of the steps to do, from where a checkpoint left off; with `until`, those before it.

        With a server it ends when every batch of every worker is in the model: a worker that has done its
        own share does the batches that dead workers left; among peers, those that slower ones give it.
        """
        work, progress = self.engine.work, self.engine.progress
        while (until is None or progress.t < until) and await work.next():
            yield progress.t
            work.finish_step()

    async def blocks(
        self, period: int, warmup: int = 0, descend: Callable[[Tensor], None] | None = None
    ) -> AsyncIterator[int]:
        """Local steps, `period` at a time: yields the last step's number after each block.

        The first `warmup` steps are blocks of one. A block that the end of training cuts short counts too.
        A step is `self.step`, or a gradient and another `descend`.
        """
        progress = self.engine.progress

        def is_whole(done: int) -> bool:
            return done <= warmup or (done - warmup) % period == 0

        while True:
            try:
                async for t in self.steps():
                    if descend is None:
                        await self.step()
                    else:
                        descend(await self.grad())
                    if is_whole(t + 1):
                        yield t
            except NoMoreSteps:
                while self.size > 1:  # others may still have data: `mean` raises when nobody has
                    progress.pass_to(next(done for done in itertools.count(progress.t + 1) if is_whole(done)))
                    yield progress.t - 1
                    await self.engine.work.cross_edge()
            if is_whole(progress.t) or self.engine.work.is_merged:
                return
            yield progress.t - 1
            if not await self.engine.work.has_grown():
                return

    async def has_more(self) -> bool:
        """After a mean that follows the last step: whether there are more, which one that died has left."""
        return await self.engine.work.has_grown()

    def is_last(self, t: int) -> bool:
        """Whether no step is known to follow step `t`: push by then what was held back."""
        return self.engine.work.is_last(t)

    @property
    def split_steps(self) -> int | None:
        """Steps of one pass over this worker's split of a data block; None where data is not in blocks."""
        return getattr(self.engine.replica, "split_steps", None)

    def grad(self, at: Tensor | None = None) -> ComingGradient:
        """The gradient of the mean loss on the next batch at `x`, or at `at`; `x` then stays what it was.

        In virtual time it costs time. Messages are answered meanwhile by the handlers that `rounds` was
        given: they must leave `x` alone. Raises Diverged when the loss is not finite, unless there is a
        server to refuse what comes of it.
        """
        compute = partial(self.engine.gradients.next, self._answers)
        return ComingGradient(compute if at is None else partial(self._at, at, compute))

    async def step(self) -> None:
        """One local step: `descend` along the gradient of the next batch at `x`, which nobody else needs.

        Raises Diverged as `grad` does, before the step.
        """
        gradients, answers = self.engine.gradients, self._answers
        if gradients.may_step and answers is None:
            await gradients.step()
        else:  # those who answer meanwhile may read `x`
            gradient = await gradients.computed(self.engine.replica.gradient, answers)
            self.descend(gradient.vector)

    def descend(self, g: Tensor, push: Push | None = None, scale: float = 1.0) -> None:
        """One step of the user's optimizer along -g.

        A server steps its slice with the learning rates, and all other numbers, that `push` came with; the
        rates times `scale`. Nothing happens where mixed precision overflowed: zeros, of no sample.
        """
        channel, replica = self.engine.channel, self.engine.replica
        began = channel.now()
        if push is None:
            channel.call_apart(replica.descend, g)  # a measured gradient has its update in it
        elif not isinstance(replica, Parameters):
            raise TypeError("a worker steps with its own optimizer; leave the push out")
        elif push.count or g.any():
            replica.apply(g, push.rate, push.numbers, scale)
        channel.meter.compute_seconds += channel.now() - began

    def check_finite(self, what: str, v: Tensor) -> None:
        """Raise Diverged if an element of what this worker is about to send is not finite."""
        flaw = self.engine.coding.flaw(v)
        if flaw is not None:
            raise Diverged(
                f"{self.engine.identity.name}: {what} is no longer finite at step {self.t}: {flaw}. "
                f"{advice_on_overflow(self.lr)}"
            )

    def reset_momentum(self) -> None:
        """Zero the local optimizer's velocity; adaptive second moments stay."""
        self.engine.replica.reset_momentum()

    # -- operations: await one, or begin it now and await it later -----------------------------

    async def begin(self, operation: Operation[T]) -> Operation[T]:
        """Begin a push, a pull or a mean, to compute meanwhile; await what this returns to complete it."""
        await operation.begin()
        return operation

    def mean(
        self, v: Tensor | Awaitable[Tensor], weight: float | None = None, key: str = ""
    ) -> Operation[Tensor]:
        """The average over all workers of a difference, weighted by the samples behind it.

        Lossy if the codec is. Waits for every worker; all get the same bits. `weight` defaults to the
        samples of this worker since its last merge. Vectors with one `key` are one stream to the codec.
        Raises PeerLost if a worker goes before it took part.
        """
        averages = self.engine.averages
        start = partial(averages.start, v, weight, key)  # type: ignore[arg-type]
        return Operation(start, partial(averages.mean, v, weight))

    async def gather(self, parts: tuple[Tensor, ...], merge: Merge, merges: bool = True) -> Tensor:
        """What `merge` makes of the parts that every worker brings: all get all, in the order of their ranks.

        Exact. Waits for every worker. `merge` gets a list of (weight, parts), where a weight is the number
        of samples since that worker's last merge; it may be called again, should somebody come or go.
        These samples count as merged then, unless `merges` is false: another mean follows.
        """
        return await self.engine.averages.gather(parts, merge, merges)

    @property
    def is_changing(self) -> bool:
        """Whether a worker has gone or is to take part: data is dealt anew when no mean is under way."""
        members = self.engine.membership
        return members is not None and members.is_changing

    @property
    def contributors(self) -> tuple[int, ...]:
        """The workers whose vectors are in the last mean or gather, by rank."""
        members = self.engine.membership
        if members is None:
            return tuple(range(self.size))
        return () if members.outcome is None else members.outcome.contributors

    def push(
        self,
        dst: int,
        v: Tensor,
        count: float | None = None,
        like: Push | None = None,
        key: str = "",
        counts: bool = True,
        may_drop: bool = False,
    ) -> Operation[None]:
        """Have a server apply a difference. Completed when it has, and would remember it after a crash.

        Lossy if the codec is. `count` defaults to the samples of this worker since its last merge. The
        learning rate goes with it: this worker's, or that of `like`. Until it is completed, `v` must not
        change. A refused update is recorded as a fault, and training goes on. A fragment, which the server's
        `inbox` must expect, has a `key`: vectors with one key are one stream to the codec. Where the server
        weighs `v` by its samples and there are none, it does not `count`: the codec keeps what it holds back.
        So it does if the server drops `v`, which it `may_drop`: then complete one push before the next.
        """
        return Operation(partial(self.engine.client.start_push, dst, v, count, like, key, counts, may_drop))

    def pull(self, src: int, out: Tensor | None = None) -> Operation[Tensor]:
        """The parameters of `src` as they were when it answered, written to `out` if that is given.

        Exact: codecs are not applied. Waits one round trip. Raises PeerLost if `src` dies first: `out` is
        then as it was, unless a server took back, after 5 s, what this node was reading in place.
        """
        client = self.engine.client
        return Operation(partial(client.start_pull, src, out, False), partial(client.pull, src, out))

    def news(self, urgent: bool = True) -> Operation[Tensor]:
        """What the server sends of its parameters that have changed since this worker's `version`.

        Exact. The server's algorithm decides which these are, and when it answers: see `News`.
        """
        return Operation(partial(self.engine.client.start_news, urgent))

    async def take_result(self) -> None:
        """Wait until every worker has handed over all it had, and take the model, the same for all."""
        await self.engine.work.wait_for_all()
        await self.pull(SERVER, out=self.x)

    async def report(self) -> None:
        """Tell the server that all samples of this worker are in the model, where no push says so."""
        await self.engine.client.report()

    # -- among peers ---------------------------------------------------------------------------

    async def rounds(
        self, answers: Handlers | None = None, helps: bool = False, takes_late: bool = False
    ) -> AsyncIterator[int]:
        """The steps to do, without a server. After each, its samples count as merged, as many for all.

        From now on `answers`, a handler for each tag, deals with messages whenever this worker waits or
        computes. With `helps`, as all then must, a worker that is done does batches of slower ones. What
        others gave in rounds that are over is dropped, unless this worker `takes_late` what has come.
        """
        rounds, work = self.engine.rounds, self.engine.work
        if self.size > 1:
            rounds.answers = {**(answers or {}), **({HELP: work.give_away} if helps else {})}
            if rounds.answers:  # else it computes undisturbed, and sees between two steps who is back
                rounds.answers |= rounds.hosts
            if helps:
                work.begin_helping()
        async for t in self.steps():
            yield t
            if not takes_late:
                rounds.take_late(t)
            await rounds.end_round(counts=not work.is_helping)

    @property
    def others(self) -> list[int]:
        """The other workers that have not gone, beginning with the next after this one."""
        return self.engine.rounds.others

    def incarnation_of(self, rank: int) -> int:
        """How often another worker was started again, as far as this one has heard."""
        return self.engine.rounds.incarnation_of(rank)

    def here(self, ranks: Collection[int]) -> list[int]:
        """Those of them that take part in further rounds, as far as this worker knows."""
        return self.engine.rounds.here(ranks)

    @property
    def done(self) -> list[int]:
        """The workers that take part in no further round, and have said so."""
        return self.engine.rounds.done

    @property
    def deaths(self) -> int:
        """How often a worker has died, this one included, as far as it knows; never falls."""
        return self.engine.rounds.deaths

    def draw(self, ranks: Iterable[int]) -> int | None:
        """One of them that has not gone, at random; None if there is none."""
        return self.engine.rounds.draw(ranks)

    async def give(
        self, t: int, to: Iterable[int], *parts: Tensor, count: float = 0.0, version: int = 0
    ) -> None:
        """Send to these in round `t`. Exact; waits for nobody."""
        await self.engine.rounds.give(t, to, *parts, count=count, version=version)

    @overload
    async def take(self, t: int, src: int, wait: bool = True) -> Message | None: ...
    @overload
    async def take(self, t: int, src: Iterable[int], wait: bool = True) -> dict[int, Message]: ...
    async def take(
        self, t: int, src: int | Iterable[int], wait: bool = True
    ) -> Message | dict[int, Message] | None:
        """What `src` sent in round `t`; None if it takes no part or, without `wait`, is not there yet.

        Of several sources, what each that took part sent, by rank.
        """
        rounds = self.engine.rounds
        if isinstance(src, int):
            return await rounds.take(t, src, wait)
        taken = {k: await rounds.take(t, k, wait) for k in src}
        return {k: m for k, m in taken.items() if m is not None}

    def take_late(self, t: int) -> list[Message]:
        """What others gave in rounds before `t` and nobody took: they had not heard of each other yet."""
        return self.engine.rounds.take_late(t)

    async def hear(self, tag: str, src: int, asked: int | None = None) -> Message | None:
        """The next message of a peer with that tag; waits for it. None if the peer has gone.

        Where time has passed since the peer was asked, `asked` is its incarnation at that time.
        """
        return await self.engine.rounds.hear(tag, src, asked)

    async def part(self, answers: Handlers | None = None) -> list[Message]:
        """Take part in no further round, and wait until nobody does; messages that nobody took.

        `answers` adds handlers for messages that come meanwhile.
        """
        return await self.engine.rounds.part(answers or {})

    async def average(self, v: Tensor) -> Tensor:
        """The mean of a vector over all workers that are left, after `part`. Exact; all get the same bits."""
        return await self.engine.rounds.average(v)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _answers(self) -> Handlers | None:
        """The handlers of messages that come while this worker computes; None if it answers none."""
        return (self.engine.rounds.answers or None) if self.size > 1 else None

    async def _at(self, at: Tensor, compute: Callable[[], Awaitable[Tensor]]) -> Tensor:
        before = self.x.clone()
        self.x.copy_(at)
        try:
            return await compute()
        finally:
            self.x.copy_(before)
