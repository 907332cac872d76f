"""Work: which batch a worker does next. Nothing else decides it, and nothing else keeps books about it.

First come the batches of its own share, each cut by the workers' speeds where they are balanced. Then come
batches of others: with a server, those of workers that died, which the server's pool hands out; among
peers, those that a slower worker gives away. Where a server hands out portions, they are all there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import torch

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Replica
from shoal.core.transport import Message
from shoal.engine.averages import Averages
from shoal.engine.balance import Balance
from shoal.engine.channel import Channel
from shoal.engine.client import Batch, Client
from shoal.engine.edges import Edges
from shoal.engine.progress import Progress
from shoal.engine.protocol import HelpAnswer, HelpOffer
from shoal.engine.rounds import Rounds

HELP = HelpOffer().tag

ASKED = 8
"""How many others a worker offers its help to before it is done."""

NONE_TAKEN = 1 << 62
"""A place in a share after all others."""


class Work:
    """The batches of one worker.

    `steps` is the length of its own share, None where only the user's loop knows. A worker that was
    restarted has none: the batches it left undone are the pool's.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        progress: Progress,
        replica: Replica,
        client: Client,
        rounds: Rounds,
        averages: Averages,
        steps: int | None,
    ) -> None:
        is_back = identity.incarnation > 0 and not identity.is_server
        self.last_step = 0 if is_back and steps is not None else steps
        self.share = steps  # batches of its own
        self._first: dict[int, int] = {}  # owner -> the first of its batches that this worker has taken over
        self.is_helping = False  # whether the batches it does now are others'
        self.balance: Balance | None = None
        self.between_steps: Callable[[], Awaitable[None]] | None = None
        self.edges: Edges | None = None  # where workers come and go
        self.on_step: Sequence[Callable[[], None]] = ()
        self._identity = identity
        self._channel = channel
        self._progress = progress
        self._replica = replica
        self._client = client
        self._rounds = rounds
        self._averages = averages
        self._helps = False
        self._is_over = False  # whether nobody has anything to give any more
        self._given = 0  # batches given away from the end of the own share
        self._taken: deque[tuple[int, int, int]] = deque()  # owner, first place, the place after the last

    # -- the next batch ------------------------------------------------------------------------

    async def next(self) -> bool:
        """Prepare the next step: checkpoints and requests to stop come first. False if no batch is left.

        Waits until it is clear that none is left: with a server, until every batch is in the model.
        """
        if self.edges is not None:
            await self.cross_edge()
        if self.balance is not None:
            self.balance.measure()
        if self.between_steps is not None:
            await self.between_steps()
        if self.balance is not None:
            await self.balance.share_out()
        if self.is_last(self._progress.t - 1) and not await self._has_more():
            return False
        if self._averages.under_way:
            await self._averages.progress()
        return True

    async def next_portion(self) -> tuple[int, int] | None:
        """As `next`, where the first server hands out all work: the pass, and the portion to do of it.

        A portion below 0 is none. None when training is over.
        """
        if self.between_steps is not None:
            await self.between_steps()
        granted = await self._client.take_portion()
        if granted is None:
            return None
        number, portion, clock = granted
        if portion >= 0:
            self._progress.go_to(clock)
            self._replica.seek(portion % self._identity.workers, portion // self._identity.workers)
        return number, portion

    async def join(self) -> None:
        """Wait until this worker, which joins a run under way, has the state to go on from."""
        assert self.edges is not None, "nobody joins a run whose workers do not come and go"
        self.last_step = await self.edges.enter()

    def go_on(self, step: int, place: int, end: int) -> None:
        """This worker is back: from this step on it does its batches from `place` to before `end`.

        A loop of the user's, whose length nobody knows, finds its place itself.
        """
        self._progress.go_to(step)
        self._progress.take_unmerged()  # there is none: what it does from here on is not in any model
        if self.share is not None:
            self.last_step = step + max(0, min(end, self.share) - place)
            self._replica.seek(self._identity.rank, place)

    def first_taken(self, owner: int) -> int:
        """The first batch of that worker's share that this one has taken over."""
        return self._first.get(owner, NONE_TAKEN)

    def finish_step(self) -> None:
        """The step is done."""
        self._progress.finish_step()
        self._channel.meter.steps = self._progress.t
        for tell in self.on_step:
            tell()

    @property
    def is_merged(self) -> bool:
        """Whether this worker has done nothing since the last average, as one that has just joined."""
        return self.edges is not None and self.edges.block_began == self._progress.t

    async def has_grown(self) -> bool:
        """After the last average: whether there are steps to do after all, which one that died has left."""
        await self.cross_edge()
        return self.last_step is not None and not self.is_last(self._progress.t - 1)

    async def cross_edge(self) -> None:
        """Between two steps, or without any when the loop has ended: go by who came and went in a round."""
        if self.edges is not None and (end := await self.edges.cross()) is not None:
            self.last_step = end

    def is_last(self, t: int) -> bool:
        """Whether no step is known to follow step `t`: what it leaves behind must be in the model by then."""
        return self.last_step is not None and t + 1 >= self.last_step - self._given

    async def wait_for_all(self) -> None:
        """With a server: return when the work of every worker is in the model.

        Where the length of a share is known, `next` has waited for that.
        """
        if self.last_step is None:
            await self._client.rest()
            await self._client.take_more()

    async def _has_more(self) -> bool:
        """Whether another worker's batch is left to do; if so it comes next."""
        batch = await (self._client.take_more() if self._identity.servers else self._take_over())
        if batch is None:
            await self._save_the_end()
            return False
        owner, place, clock = batch
        self._progress.go_to(clock)
        self._replica.seek(owner, place)
        return True

    async def _save_the_end(self) -> None:
        """Where workers stand at steps of their own, as after batches of dead ones: save at a common one."""
        if self.between_steps is None:
            return
        if self._client.end is not None:
            self.last_step = self._client.end
            self._progress.save_at(self.last_step)
        elif self.is_ahead:
            self.last_step = self._rounds.end_share(self.last_step or 0)
        else:
            return
        await self.between_steps()

    @property
    def is_ahead(self) -> bool:
        """Whether this worker was back, and is at a later round than at a batch of its share."""
        return self._rounds.shift > 0

    # -- helping slower peers ------------------------------------------------------------------

    def begin_helping(self) -> None:
        """From now on take over batches of slower workers when the own share is done, as all then must."""
        self._helps = True

    @property
    def may_help(self) -> bool:
        """Whether this worker may still be given batches of others when it is done with its own."""
        return self._helps and not self._is_over

    async def give_away(self, m: Message) -> None:
        """Answer an offer of help with the later half of what is left here, beside the step at hand."""
        half = torch.tensor(self._half(), dtype=torch.int64)
        await self._channel.send(m.src, HelpAnswer(parts=(half,)))

    async def _take_over(self) -> Batch | None:
        """A batch that a slower worker would come to later; None when none of those asked has one."""
        if not self._helps:
            return None
        if not self._taken:
            await self._offer_help()
        if not self._taken:
            await self._end()
            return None
        owner, place, end = self._taken.popleft()
        if place + 1 < end:
            self._taken.appendleft((owner, place + 1, end))
        self.is_helping = True
        return owner, place, self._progress.clock

    def _half(self) -> tuple[int, ...]:
        """The later half of the batches that are left, and no longer this worker's: owner, first, end."""
        if self._taken:
            owner, first, end = self._taken.pop()
            middle = (first + end) // 2
            if first < middle:
                self._taken.append((owner, first, middle))
            return owner, middle, end
        first, end = self._progress.t + 1, (self.last_step or 0) - self._given
        if self.is_helping or first >= end:
            return ()
        middle = (first + end) // 2
        self._given += end - middle
        return self._identity.rank, middle, end

    async def _offer_help(self) -> None:
        for k in self._rounds.others[:ASKED]:
            await self._channel.send(k, HelpOffer())
            answer = await self._rounds.hear("helped", k)
            if answer is not None and answer.body.numel():
                owner, first, end = answer.body.tolist()
                self._taken.append((owner, first, end))
                self._first[owner] = min(first, self.first_taken(owner))
                return

    async def _end(self) -> None:
        """Count the batches that others did as this worker's, and its own again from the next run on."""
        assert self.last_step is not None, "it would not have come to the end of its share"
        if self._given or self.is_helping:
            self._progress.go_to(self.last_step)
            self._replica.seek(self._identity.rank, self.last_step)
        self._given, self.is_helping, self._is_over = 0, False, True
        if self.between_steps is not None:
            await self.between_steps()
