"""Peers: what workers without a server say to each other, round by round, until all are done.

A message belongs to the round whose number is its `seq`, so that rounds are never mixed up, whoever is ahead
or behind. Who has gone, or takes part in no further round, is left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.engine.background import Handlers
from shoal.engine.helping import HELP, Helping

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

ROUND = "round"
"""Tag of what belongs to a round."""

OVER = 1 << 62
"""The round that comes after all others: who sends it takes part in no further one."""

STILL_THERE = -1
"""The round that never was: who sends it has not gone."""


class Peers:
    """The other workers, as one of them sees them. `answers` is what it does about questions, by tag."""

    def __init__(self, node: Node) -> None:
        self.answers: Handlers = {}
        self.helping = Helping(node)
        self._node = node
        self._held: dict[tuple[int, int], Message] = {}  # (sender, round) -> arrived, not taken yet
        self._latest: dict[int, int] = {}  # sender -> the last round it has sent something for
        self._speaks_at = 0.0

    async def rounds(self, answers: Handlers | None = None, helps: bool = False) -> AsyncIterator[int]:
        """The steps to do. After each of them its samples count as merged, as many for every worker.

        From now on `answers` deals with questions whenever this worker waits, also when it has no step left.
        Where it `helps`, as all then must, whoever is done does batches of those who are behind.
        """
        node = self._node
        if node.size > 1:
            self.answers = {**(answers or {}), **({HELP: self.helping.answer} if helps else {})}
        async for t in node.steps():
            yield t
            if not self.helping.is_helping:  # by then as many as all are to do
                node.merged += node.unmerged * node.size
            node.unmerged = 0.0
            await self._reassure()

    @property
    def may_help(self) -> bool:
        """Whether this worker may still be given batches of others when it is done with its own."""
        return HELP in self.answers and not self.helping.has_ended

    async def take_more(self) -> tuple[int, int, int] | None:
        """A batch that another worker gives away, where they do: whose it is, its place there, the clock."""
        return await self.helping.more() if HELP in self.answers else None

    def here(self, ranks: Iterable[int]) -> list[int]:
        """Those of them that have not gone and take part in further rounds, as far as this worker knows."""
        self._sort_in()
        return [k for k in ranks if k in self._node.working and self._latest.get(k, 0) < OVER]

    def draw(self, ranks: Iterable[int]) -> int | None:
        """One of them that has not gone, at random; None if there is none."""
        self._sort_in()
        left = [k for k in ranks if k in self._node.working]
        return left[int(torch.randint(len(left), (1,), generator=self._node.rng))] if left else None

    async def give(self, t: int, to: Iterable[int], *parts: Tensor, count: float = 0.0) -> None:
        """Send to these in round `t`. Exact; waits for nobody."""
        rank, size = self._node.rank, self._node.size
        for k in sorted(to, key=lambda k: (k - rank) % size):  # so that not all send to worker 0 first
            await self._node.send(k, Message(ROUND, parts, seq=t, count=count))

    async def take(self, t: int, src: int) -> Message | None:
        """What `src` sent in round `t`; waits for it. None if it took no part."""
        while (src, t) not in self._held and self._latest.get(src, STILL_THERE) < t:
            m = await self.hear(ROUND, src)
            if m is None:
                return None
            self._note(m)
        return self._held.pop((src, t), None)

    async def exchange(self, t: int, peers: Iterable[int], *parts: Tensor) -> dict[int, Message]:
        """Send to these in round `t`, and wait for what they send, by rank."""
        present = self.here(peers)
        await self.give(t, present, *parts)
        return await self.gather(t, present)

    async def gather(self, t: int, peers: Iterable[int]) -> dict[int, Message]:
        """What these sent in round `t`, by rank; waits for it. Who took no part is left out."""
        taken = {k: await self.take(t, k) for k in peers}
        return {k: m for k, m in taken.items() if m is not None}

    def arrived(self, t: int, src: int) -> Message | None:
        """What `src` sent in round `t`, if it is there; never waits."""
        self._sort_in()
        return self._held.pop((src, t), None)

    async def hear(self, tag: str, src: int) -> Message | None:
        """The next message of `src` with that tag; waits for it. None if `src` has gone."""
        node = self._node
        try:
            m = await node.recv(tag, src, self.answers)
        except PeerLost:
            if src in node.working:  # it is there, but has been silent for too long
                raise
            return None
        m.parts = tuple(part.to(node.x.device) for part in m.parts)
        return m

    # -- the end -------------------------------------------------------------------------------

    async def part(self) -> list[Message]:
        """Take part in no further round, and wait until nobody else does; what has come and was not taken."""
        node = self._node
        others = [k for k in range(node.size) if k != node.rank]
        await self.give(OVER, [k for k in others if k in node.working])
        for k in others:
            await self.take(OVER, k)
        left, self._held = self._held, {}
        return [m for _, m in sorted(left.items(), key=lambda item: item[0])]

    async def average(self, x: Tensor) -> Tensor:
        """The mean of the `x` of all who are left, the same bits for all; `x` itself if one goes meanwhile.

        Exact: codecs are not applied. Up a binary tree and down again: 3 n bytes a worker at most.
        """
        node = self._node
        left = [k for k in range(node.size) if k == node.rank or k in node.working]
        place = left.index(node.rank)
        children = left[2 * place + 1 : 2 * place + 3]
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)  # half could not hold the sum
        tally = torch.tensor([1.0, node.meter.samples], dtype=torch.float64)  # workers, samples
        try:
            for k in children:
                m = await node.mailbox.find("total", k, needed=left)
                total += m.parts[0].to(x.device)
                tally += m.parts[1]
            if place > 0:
                parent = left[(place - 1) // 2]
                await node.send(parent, Message("total", (total, tally)))
                total, tally = (await node.mailbox.find("average", parent, needed=left)).parts
            else:
                total /= float(tally[0])
        except PeerLost as lost:  # who is left is not the same for all any more: nobody may wait in vain
            node.note_fault(str(lost))
            return x
        for k in children:
            await node.send(k, Message("average", (total, tally)))
        node.merged = float(tally[1])
        return total.to(x)

    # -- inside --------------------------------------------------------------------------------

    def _sort_in(self) -> None:
        """Take note of what has arrived."""
        for m in self._node.poll(ROUND):
            m.parts = tuple(part.to(self._node.x.device) for part in m.parts)
            self._note(m)

    def _note(self, m: Message) -> None:
        self._latest[m.src] = max(m.seq, self._latest.get(m.src, STILL_THERE))
        if m.seq >= 0:
            self._held[m.src, m.seq] = m

    async def _reassure(self) -> None:
        """Let those who are done hear now and then that this worker is not: they give up after a silence."""
        node, now = self._node, self._node.transport.now()
        if node.timeout is None or now < self._speaks_at:
            return
        self._speaks_at = now + node.timeout / 3
        self._sort_in()
        done = [k for k, latest in self._latest.items() if latest == OVER and k in node.working]
        await self.give(STILL_THERE, done)
