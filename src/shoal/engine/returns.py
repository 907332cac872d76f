"""Returns: workers without a server that died and were started again, and those who take them back.

Who is back asks all others: how much of its share they know to be done, which of its batches they have taken
over, where they are. One gives it the model. Then it tells all from which round on it takes part; nobody
waits for it before that. It does the rest of its share, and no batch twice that anybody has heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import StateHead, StatePart
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.progress import Progress
from shoal.engine.protocol import Back, Known, Ready
from shoal.engine.rounds import Rounds
from shoal.engine.state_transfer import StateArrival, messages
from shoal.engine.work import Work

TOO_LATE, HAS_MODEL, HAS_NONE = range(3)
"""Where a worker stands that is asked: past the last round, training, or just back itself."""

AHEAD = 2
"""Rounds between where the others are and where one that is back takes part."""


class Returns:
    """One worker's part in returns, its own and those of others.

    `share` gives what one that is back goes on from; None where none is taken back.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        progress: Progress,
        rounds: Rounds,
        work: Work,
    ) -> None:
        self.share: Callable[[], dict[str, Tensor]] | None = None
        self._identity = identity
        self._channel = channel
        self._progress = progress
        self._rounds = rounds
        self._work = work
        self._has_model = identity.incarnation == 0
        rounds.hosts = {Back().tag: self._answer, Ready().tag: self._note_ready}

    # -- at those who are there ----------------------------------------------------------------

    async def _answer(self, m: Message) -> None:
        """One that is back asks where things stand or, with a count, for the model."""
        if m.count:
            if self._has_model and self.share is not None:  # else it was asked as one that has died
                for piece in messages(self.share(), 0):
                    await self._channel.send(m.src, piece)
            return
        standing = TOO_LATE if self._rounds.has_parted else HAS_MODEL if self._has_model else HAS_NONE
        self._rounds.forget(m.src)
        done, first = self._progress.place_of(m.src), self._work.first_taken(m.src)
        known = torch.tensor([standing, done, first, self._progress.t], dtype=torch.int64)
        await self._channel.send(m.src, Known(parts=(known,)))

    async def _note_ready(self, m: Message) -> None:
        await self._rounds.let_in(m.src, m.incarnation, m.seq)

    # -- at the one that is back ---------------------------------------------------------------

    async def come_back(self, in_rounds: bool, take: Callable[[Mapping[str, Any]], None]) -> None:
        """Get the model from one of the others, and go on with the rest of the own share.

        `take` is called with what one shared. Raises RunIsOver if the others have ended, or nobody has the
        model.
        """
        others = [k for k in range(self._identity.workers) if k != self._identity.rank]
        asked = {k: self._rounds.incarnation_of(k) for k in others}
        for k in others:
            await self._channel.send(k, Back())
        answers = {k: await self._rounds.hear(Known().tag, k, asked[k]) for k in others}
        known = {k: m.body.tolist() for k, m in answers.items() if m is not None}
        holders = [k for k, (standing, *_) in known.items() if standing == HAS_MODEL]
        if not holders or any(standing == TOO_LATE for standing, *_ in known.values()):
            raise RunIsOver
        take(await self._fetch({k: asked[k] for k in holders}))
        place = max(done for _, done, _, _ in known.values())
        step = max(known[k][3] for k in holders) + AHEAD if in_rounds else place
        self._work.go_on(step, place, min(first for _, _, first, _ in known.values()))
        self._rounds.shift = step - place
        self._has_model = True
        for k in filter(self._progress.works, others):
            await self._channel.send(k, Ready(seq=step if in_rounds else 0))
            await self._rounds.skip(step - 1, k)

    async def _fetch(self, holders: Mapping[int, int]) -> dict[str, Any]:
        """What the first of these, by rank and incarnation, shares who lives long enough."""
        for k, incarnation in holders.items():
            await self._channel.send(k, Back(count=1.0))
            head = await self._rounds.hear(StateHead().tag, k, incarnation)
            arrival = None if head is None else StateArrival(head)
            while arrival is not None and not arrival.is_whole:
                part = await self._rounds.hear(StatePart().tag, k, incarnation)
                if part is None:
                    arrival = None
                else:
                    arrival.add(part)
            if arrival is not None:
                return arrival.state()
        raise RunIsOver
