"""Rounds: what workers without a server give each other, round by round, until all are done.

A message belongs to the round whose number is its `seq`, so that rounds are never mixed up, whoever is ahead
or behind. Workers that have gone, or take part in no further round, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Replica
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.engine.protocol import FinalMean, Handlers, PartialSum, Round
from shoal.engine.underway import attend_until

OVER = 1 << 62
"""The round after all others: a worker that sends it takes part in no further one."""

STILL_THERE = -1
"""A round that never was: a worker that sends it has not gone."""


class Rounds:
    """The other workers, as one of them sees them.

    `answers` holds the handlers for messages that come while this worker waits or computes.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        progress: Progress,
        replica: Replica,
        rng: Callable[[], torch.Generator],
    ) -> None:
        self.answers: Handlers = {}
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self._progress = progress
        self._replica = replica
        self._rng = rng
        self._held: dict[tuple[int, int], Message] = {}  # (sender, round) -> arrived, not taken yet
        self._latest: dict[int, int] = {}  # sender -> the last round it has sent something for
        self._watched = {identity.rank}
        self._spoke_at = -math.inf
        self._ready: dict[int, tuple[int, int]] = {}  # who was back -> as which incarnation, from which round
        self.hosts: Handlers = {}  # for messages of workers that are back
        self.shift = 0  # rounds that this worker, which was back, is ahead of its place in its share
        self._is_parting = False
        self.has_parted = False  # whether no worker takes part in any further round

    # -- who is there --------------------------------------------------------------------------

    @property
    def others(self) -> list[int]:
        """The other workers that have not gone, beginning with the next after this one."""
        rank, size = self._identity.rank, self._identity.workers
        return [k % size for k in range(rank + 1, rank + size) if self._is_there(k % size)]

    def here(self, ranks: Collection[int]) -> list[int]:
        """Those of them that have not gone and take part in further rounds, as far as this worker knows."""
        self._sort_in()
        if not self._watched.issuperset(ranks):
            for k in sorted(set(ranks) - self._watched):
                self._mailbox.watch(k)
            self._watched.update(ranks)
        return [k for k in ranks if self._is_in(k) and self._latest.get(k, 0) < OVER]

    @property
    def done(self) -> list[int]:
        """The workers that take part in no further round, and have said so."""
        self._sort_in()
        return sorted(k for k, latest in self._latest.items() if latest == OVER)

    @property
    def deaths(self) -> int:
        """How often a worker has died, as far as this worker knows."""
        self._sort_in()
        return self._identity.incarnation + self._progress.deaths

    def draw(self, ranks: Iterable[int]) -> int | None:
        """One of them that has not gone, at random; None if there is none."""
        self._sort_in()
        left = [k for k in ranks if self._is_in(k)]
        return left[int(torch.randint(len(left), (1,), generator=self._rng()))] if left else None

    def _is_in(self, rank: int) -> bool:
        """Whether that worker takes part in this round."""
        return self._is_there(rank) and self._progress.t >= self._ready.get(rank, (0, 0))[1]

    def _is_there(self, rank: int) -> bool:
        """Whether that worker has not gone, and is not back without having said that it takes part."""
        incarnation, _ = self._ready.get(rank, (0, 0))
        return self._progress.works(rank) and self._mailbox.incarnations.get(rank, 0) <= incarnation

    def incarnation_of(self, rank: int) -> int:
        """How often that worker was started again, as far as this one has heard."""
        return self._mailbox.incarnations.get(rank, 0)

    def forget(self, rank: int) -> None:
        """That worker was started again: what it said of rounds is of one that is dead."""
        self._latest.pop(rank, None)
        self._held.pop((rank, OVER), None)

    async def let_in(self, rank: int, incarnation: int, begins: int) -> None:
        """That worker, which was back, takes part from this round on."""
        self._ready[rank] = incarnation, begins
        await self.skip(self._progress.t, rank)
        if self._is_parting:
            await self.give(OVER, [rank])

    async def skip(self, t: int, rank: int) -> None:
        """Tell that worker that nothing comes for the rounds up to this one: it need not wait."""
        await self._channel.send(rank, Round(seq=STILL_THERE - 1 - t))

    # -- giving and taking ---------------------------------------------------------------------

    async def give(
        self, t: int, to: Iterable[int], *parts: Tensor, count: float = 0.0, version: int = 0
    ) -> None:
        """Send to these in round `t`. Exact; waits for nobody."""
        rank, size = self._identity.rank, self._identity.workers
        for k in sorted(to, key=lambda k: (k - rank) % size):  # so that not all send to worker 0 first
            m = Round(parts=parts, seq=t, count=count, version=version, clock=self.place)
            await self._channel.send(k, m)

    @property
    def place(self) -> int:
        """Batches of its own share that this worker has done."""
        return self._progress.clock - self.shift

    def end_share(self, step: int) -> int:
        """This worker has done its share at this step: from now on it counts steps as the others do."""
        place, self.shift = step - self.shift, 0
        self._progress.go_to(place)
        self._progress.take_unmerged()
        return place

    async def take(self, t: int, src: int, wait: bool = True) -> Message | None:
        """What `src` sent in round `t`. None if it took no part or, without `wait`, if it is not there."""
        wait = wait and (t == OVER or self._is_in(src))
        if not wait:
            self._sort_in()
        while wait and (src, t) not in self._held and self._latest.get(src, STILL_THERE) < t:
            m = await self.hear("round", src)
            if m is None:
                return None
            self._note(m)
        return self._held.pop((src, t), None)

    def take_late(self, t: int) -> list[Message]:
        """What has come for rounds before `t` and nobody took."""
        return [self._held.pop(key) for key in sorted(self._held) if key[1] < t] if self._held else []

    async def hear(self, tag: str, src: int, asked: int | None = None) -> Message | None:
        """The next message of `src` with that tag; waits for it. None if `src` has gone.

        So it is if it was `asked` as an earlier incarnation, which has not answered before it died.
        """
        incarnations = self._mailbox.incarnations
        before = incarnations.get(src)
        if asked is not None and asked != (before or 0) and not self._mailbox.holds(tag, [src], None):
            return None
        try:
            m = await self._mailbox.find(tag, src, handlers={**self.answers, **self.hosts})
        except PeerLost:
            if self._progress.works(src) and incarnations.get(src) == before:
                raise  # it is there, but has been silent for too long
            return None
        return self._here(m)

    async def end_round(self, counts: bool) -> None:
        """A step is over; if it `counts`, its samples count as merged, as many for every worker."""
        own = self._progress.take_unmerged()
        if counts:
            self._progress.merge(own * self._identity.workers)
        await self._mailbox.attend(self.hosts, 0.0)
        await self._reassure()

    async def answer_until(self, is_done: Callable[[], bool]) -> None:
        """Answer what others ask until something is done that this node waits for elsewhere."""
        await attend_until(is_done, self._mailbox, {**self.answers, **self.hosts})

    # -- the end -------------------------------------------------------------------------------

    async def part(self, answers: Handlers) -> list[Message]:
        """Take part in no further round, and wait until nobody does; the messages that nobody took.

        `answers` adds handlers for messages that come meanwhile.
        """
        self.answers = {**self.answers, **answers}
        me = self._identity
        others, works = [k for k in range(me.workers) if k != me.rank], self._progress.works
        self._is_parting = True
        await self.give(OVER, [k for k in others if works(k)])
        while going_on := [k for k in others if works(k) and self._latest.get(k, STILL_THERE) < OVER]:
            await self.take(OVER, going_on[0])
        self.has_parted = True
        return self.take_late(OVER)

    async def average(self, x: Tensor) -> Tensor:
        """The mean of the `x` of all who are left, the same bits for all; `x` itself if one goes meanwhile.

        Exact: codecs are not applied. Up a binary tree and down again: 3 n bytes a worker at most.
        """
        me, progress, send = self._identity, self._progress, self._channel.send
        left = [k for k in range(me.workers) if k == me.rank or self._is_there(k)]
        place = left.index(me.rank)
        children = left[2 * place + 1 : 2 * place + 3]
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)  # half could not hold the sum
        tally = torch.tensor([1.0, progress.samples], dtype=torch.float64)  # workers, samples
        try:
            for k in children:
                m = await self._mailbox.find("total", k, left, self.hosts)
                total += m.parts[0].to(x.device)
                tally += m.parts[1]
            if place > 0:
                parent = left[(place - 1) // 2]
                await send(parent, PartialSum(parts=(total, tally)))
                total, tally = (await self._mailbox.find("average", parent, left, self.hosts)).parts
            else:
                total /= float(tally[0])
        except PeerLost as lost:  # workers no longer agree on who is left: nobody may wait in vain
            self._channel.note_fault(str(lost))
            return x
        for k in children:
            await send(k, FinalMean(parts=(total, tally)))
        progress.hold(float(tally[1]))
        return total.to(x)

    # -- inside --------------------------------------------------------------------------------

    def _sort_in(self) -> None:
        """Take note of what has arrived."""
        for m in self._mailbox.poll("round"):
            self._note(self._here(m))

    def _here(self, m: Message) -> Message:
        """The message with its parts on this worker's device."""
        m.parts = tuple(part.to(self._replica.x.device) for part in m.parts)
        return m

    def _note(self, m: Message) -> None:
        if m.incarnation < self.incarnation_of(m.src) and m.seq >= self._ready.get(m.src, (0, OVER))[1]:
            return  # it has died since, and its successor takes part in these rounds
        latest = m.seq if m.seq >= STILL_THERE else STILL_THERE - 1 - m.seq  # below it, rounds are skipped
        self._latest[m.src] = max(latest, self._latest.get(m.src, STILL_THERE))
        if m.seq >= 0:
            self._held[m.src, m.seq] = m

    async def _reassure(self) -> None:
        """Tell those who are done, now and then, that this worker is not: they give up after a silence."""
        timeout, now = self._channel.timeout, self._channel.now()
        if timeout is None or 0 <= now - self._spoke_at < timeout / 3:  # below 0: the clock has gone back
            return
        self._spoke_at = now
        self._sort_in()
        done = [k for k, latest in self._latest.items() if latest == OVER and self._progress.works(k)]
        await self.give(STILL_THERE, done)
