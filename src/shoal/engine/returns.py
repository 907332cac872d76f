"""Returns: workers without a server that died and were started again, and those who take them back.

Who is back asks all others: how much of its share they know to be done, which of its batches they have taken
over, where they are. One gives it the model. Then it tells all from which round on it takes part; nobody
waits for it before that. It does the rest of its share, and no batch twice that anybody has heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import StateHead, StatePart
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.progress import Progress
from shoal.engine.protocol import Back, BatchesRead, Known, Ready
from shoal.engine.reached import UNKNOWN
from shoal.engine.rounds import Rounds
from shoal.engine.state_transfer import StateArrival, messages
from shoal.engine.work import Work

TOO_LATE, HAS_MODEL, HAS_NONE = range(3)
"""Where a worker stands that is asked: past the last round, training, or just back itself."""

AHEAD = 2
"""Rounds between where the others are and where one that is back takes part."""


BESIDE = "beside/"
"""Begins the names of tensors that no strategy trains, among those that one shares."""


class OwnLoop(Protocol):
    """The training loop of a user's script, which begins anew in a process that is started again."""

    def beside(self) -> Sequence[Tensor]:
        """The tensors of the model that are not trained."""
        ...

    def go_on(self, batches: int, beside: Sequence[Tensor]) -> None:
        """Leave out so many batches, and take those tensors of another. Raises RunIsOver if it cannot."""
        ...


class Returns:
    """One worker's part in returns, its own and those of others.

    `share` gives what one that is back goes on from; None where none is taken back. `loop` is the user's, if
    the batches come from there.
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
        self.loop: OwnLoop | None = None
        self._identity = identity
        self._channel = channel
        self._progress = progress
        self._rounds = rounds
        self._work = work
        self._has_model = identity.incarnation == 0
        self._told: BatchesRead | None = None  # what this worker has told of its loop, if it is not the usual
        self._read: dict[int, dict[int, int]] = {}  # by rank: batches that its loop had read, by steps done
        rounds.hosts = {
            Back().tag: self._answer,
            Ready().tag: self._note_ready,
            BatchesRead().tag: self._note_batches,
        }

    # -- at those who are there ----------------------------------------------------------------

    async def _answer(self, m: Message) -> None:
        """One that is back asks where things stand or, with a count, for the model."""
        if m.count:
            if self._has_model and self.share is not None:  # else it was asked as one that has died
                beside = () if self.loop is None else self.loop.beside()
                named = {f"{BESIDE}{n}": tensor for n, tensor in enumerate(beside)}
                for piece in messages({**self.share(), **named}, 0):
                    await self._channel.send(m.src, piece)
            return
        standing = TOO_LATE if self._rounds.has_parted else HAS_MODEL if self._has_model else HAS_NONE
        self._rounds.forget(m.src)
        done, first = self._progress.place_of(m.src), self._work.first_taken(m.src)
        numbers = [standing, done, first, self._progress.t, self._batches_of(m.src, done)]
        known = torch.tensor(numbers, dtype=torch.int64)
        await self._channel.send(m.src, Known(parts=(known,)))

    async def _note_ready(self, m: Message) -> None:
        await self._rounds.let_in(m.src, m.incarnation, m.seq)
        if self._told is not None:
            await self._channel.send(m.src, self._told)

    async def _note_batches(self, m: Message) -> None:
        read, done = self._read.setdefault(m.src, {}), self._progress.place_of(m.src)
        read[int(m.count)] = m.seq
        for step in [step for step in read if step < done and len(read) > 1]:
            del read[step]

    def _batches_of(self, rank: int, steps: int) -> int:
        """How many batches that worker's loop had read after so many steps: one each, unless it has told."""
        read = self._read.get(rank)
        return steps if read is None else read.get(steps, UNKNOWN)

    async def tell_batches(self, batches: int, steps: int) -> None:
        """Have all others know how many batches this worker's loop has read for its first so many steps."""
        self._told = BatchesRead(seq=batches, count=float(steps))
        for k in self._rounds.others:
            await self._channel.send(k, self._told)

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
        shared = await self._fetch({k: asked[k] for k in holders})
        take({name: tensor for name, tensor in shared.items() if not name.startswith(BESIDE)})
        place = max(done for _, done, *_ in known.values())
        step = max(known[k][3] for k in holders) + AHEAD if in_rounds else place
        if self.loop is not None:
            beside = [shared[f"{BESIDE}{n}"] for n in range(len(self.loop.beside()))]
            read = {batches for _, done, _, _, batches in known.values() if done == place}
            self.loop.go_on(read.pop() if len(read) == 1 else UNKNOWN, beside)
        self._work.go_on(step, place, min(first for _, _, first, *_ in known.values()))
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
