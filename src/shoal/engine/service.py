"""Service: the server's half of push and pull. Every update is applied once, whatever the network repeats.

A server is a fold over its messages. Each message is written to the log before the algorithm sees it, so
that a successor that reads the log reaches the same state; an answer leaves only when what it speaks of
would survive a crash. See `protocol` for the requests and their answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import WireError, describe_refusal
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Replica
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.coding import Coding
from shoal.engine.ledger import Ledger
from shoal.engine.log import Keeping, describe_return
from shoal.engine.mailbox import Mailbox
from shoal.engine.one_sided import OneSided
from shoal.engine.pool import HandsOut, Pool
from shoal.engine.progress import Progress
from shoal.engine.protocol import (
    Ack,
    BatchesRead,
    Busy,
    Checkpointed,
    Fewer,
    Grant,
    Idle,
    Instruction,
    Joined,
    Late,
    Left,
    Look,
    Lost,
    More,
    News,
    Notice,
    Numbers,
    Over,
    Pull,
    Push,
    Refused,
    Reply,
    Report,
    Request,
    RolledBack,
    Wait,
    Where,
    typed,
)
from shoal.engine.push_reader import PushReader
from shoal.engine.reached import Reached
from shoal.engine.savers import Savers

_SHOWN = (Push, Pull, Report, Instruction)  # the algorithm sees these
_CONTRIBUTES = (*_SHOWN, Busy, BatchesRead, Where)  # whoever sends these has more to do
_OURS = (Request, Report, BatchesRead, Checkpointed, Notice)  # others pass through: the algorithm's


class Service:
    """What a server knows of its clients. `pool` is there at the one server that keeps it."""

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        coding: Coding,
        progress: Progress,
        replica: Replica,
        one_sided: OneSided,
        keeping: Keeping,
        pool: HandsOut | None = None,
    ) -> None:
        everyone = range(identity.workers if identity.is_server else 0)
        self.active = set(everyone)  # workers that still contribute
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self.reader = PushReader(coding, replica.x.numel())
        self._progress = progress
        self._replica = replica
        self._one_sided = one_sided
        self._keeping, self._log = keeping, keeping.log
        self._pool, self._ledger = pool, Ledger()
        self.samples = 0.0  # of all workers, that they have handed over
        self.reached = Reached(identity.workers, channel.now)
        self.beside: Sequence[Tensor] = ()  # tensors of the model that are not trained, for who is back
        self._lost: set[int] = set()
        self._left: set[int] = set()  # in order: they were told that all is done
        self._held: dict[int, Message] = {}  # worker -> its request for more, not answered yet
        self._answers: list[tuple[int, Message]] = []  # to be sent once the log is safe
        self.savers = Savers(identity.workers)
        self._past: Iterable[Message] = ()
        self._replaying = False

    def begin(self) -> None:
        """Recover a predecessor's state, if there was one, and put the parameters where peers can read."""
        if self._log is not None:
            state, self._past = self._log.recover()
            if state is not None:
                self._keeping.load(state)
            else:
                self._log.snapshot(self._keeping.state())  # a successor must know the start, too
        self._one_sided.share()

    async def messages(self) -> AsyncIterator[Message]:
        """Pushes, pulls, Fewer and RolledBack in order of arrival; ends when every worker has left."""
        async for m in self._incoming():
            if not isinstance(m, _OURS):
                yield m
            elif await self._accepts(m):
                fewer = self._track(m)
                if fewer:
                    await self._save_if_all_have()
                if isinstance(m, _SHOWN) or fewer:
                    if self._one_sided.can_lend and (isinstance(m, News) or not isinstance(m, Pull)):
                        await self._one_sided.reclaim()  # the algorithm may change the parameters
                    yield m if isinstance(m, _SHOWN) else Fewer(src=m.src)
                await self._settle(m)

    async def reply(self, m: Message, v: Tensor, version: int | None = None) -> None:
        """Answer a pull with a state. Every update in it is safe by then."""
        if self._answers or self._log is not None:
            await self._flush()
        if not self._replaying:
            answer = Reply(parts=(v,), seq=m.seq)
            answer.version = self._progress.version if version is None else version
            await self._channel.send(m.src, answer, lend=m.count > 0 and self._one_sided.lends(v))

    def answer(self, m: Instruction, *numbers: float) -> None:
        """Answer an instruction, which is then done for good; the answer leaves with the next ones."""
        self._conclude(m, Numbers(parts=(torch.tensor(numbers, dtype=torch.float64),), seq=m.seq))

    def drop(self, m: Push) -> None:
        """Leave a push out, and have its sender know."""
        self._channel.meter.dropped += 1
        self._conclude(m, Late(seq=m.seq, version=self._progress.version))

    def hand_out(self, source: HandsOut) -> None:
        """From now on give workers that ask for more what this has, instead of batches of dead workers."""
        self._pool = source

    def excuse(self, workers: Iterable[int]) -> None:
        """These workers left in order before this server was there: do not wait for them."""
        self._left.update(workers)

    def resume(self) -> None:
        """Serve workers that all start over from a checkpoint: nobody is gone, done or waiting."""
        for gone in (self._held, self._left, self._lost):
            gone.clear()
        self._mailbox.forget_departures()
        self._ledger.start_over()
        self.reached.start_over()
        self.active = set(range(self._identity.workers))
        self._progress.start_over()

    def begin_at(self, clocks: Sequence[int], samples: float) -> None:
        """The first batches of each worker are in the model: the run goes on from where others have left."""
        self.samples = samples
        if isinstance(self._pool, Pool):
            self._pool.begin_at(clocks)

    def lengthen(self, steps: int) -> None:
        """The share of each worker has so many batches now."""
        if isinstance(self._pool, Pool):
            self._pool.lengthen(steps)

    def state(self) -> dict[str, Any]:
        """Everything that a later message may act upon, as plain values."""
        return {
            "ledger": self._ledger.state(),
            "samples": self.samples,
            "savers": {str(rank): incarnation for rank, incarnation in self.savers.members.items()},
            **self.reached.state(),
            "pool": None if self._pool is None else self._pool.state(),
            "held": [[m.src, m.seq, m.clock, m.incarnation] for m in self._held.values()],
            "active": sorted(self.active),
            "lost": sorted(self._lost),
            "left": sorted(self._left),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._ledger.load(state["ledger"])
        self.samples = state["samples"]
        self.reached.load(state)
        if self._pool is not None and state["pool"] is not None:
            self._pool.load(state["pool"])
        self._held = {
            src: More(src=src, seq=seq, clock=clock, incarnation=incarnation)
            for src, seq, clock, incarnation in state["held"]
        }
        self.active, self._lost = set(state["active"]), set(state["lost"])
        self._left |= set(state["left"])  # a worker that was excused since stays so
        for rank in state["lost"]:
            self._mailbox.note(Lost(src=rank))
        for rank in state["left"]:
            self._mailbox.note(Left(src=rank))

    # -- what arrives --------------------------------------------------------------------------

    async def _incoming(self) -> AsyncIterator[Message]:
        """The messages in a predecessor's log, then what arrives."""
        mailbox, log = self._mailbox, self._log
        self._replaying = True
        for m in self._past:
            mailbox.note(typed(m))
            yield m
        self._replaying = False
        if self._identity.incarnation and log is not None:
            name, version = self._identity.name, self._progress.version
            self._channel.note_fault(describe_return(log, name, version))
            if not log.keeps_every_update:
                news = RolledBack(src=self._identity.rank)
                log.append(news)
                yield news
        while await self._is_needed():
            yield await mailbox.next()
            if log is not None and log.snapshot_is_due():
                log.snapshot(self._keeping.state())
        if log is not None:
            log.close()

    async def _is_needed(self) -> bool:
        """Whether there is more to come. When all workers are lost, one may come back."""
        if (self._answers or self._log is not None) and not self._mailbox.has_arrived():
            await self._flush()
        if self._progress.anybody_works or self._mailbox.has_arrived():
            return True
        return not self._left and await self._mailbox.sees_a_return()

    async def _accepts(self, m: Message) -> bool:
        """Whether to act on this message; if so it is written to the log, and a push is decoded."""
        if isinstance(m, Checkpointed):
            if not self._ledger.has_fenced(m) and m.seq > self._progress.t:
                self.savers.note(m.src, m.incarnation, m.seq)
                await self._save_if_all_have()
            return False
        if isinstance(m, Look):
            await self.reply(m, self.beside[int(m.count) - 1] if m.count else self._replica.x)
            return False
        if isinstance(m, Request) and (known := self._ledger.answer_to(m)) is not None:
            self._answers.append((m.src, known))
            await self._flush()
            return False
        if isinstance(m, (Report, BatchesRead)) and self._ledger.has_fenced(m):
            return False
        if isinstance(m, More) and self._ledger.has_gone_on(m):  # a late copy of what was rolled back
            return False
        decoded = None
        if isinstance(m, Push) and (decoded := self._checked(m)) is None:
            await self._flush()
            return False
        if self._log is not None and not self._replaying:
            self._log.append(m)
        m.parts = m.parts if decoded is None else decoded
        return True

    def _checked(self, m: Push) -> tuple[Tensor, ...] | None:
        """The vector of a push, and its numbers; refused, and None, where it would spoil the model."""
        version = self._progress.version
        try:
            decoded = self.reader.decode(m)
        except WireError as problem:
            text = describe_refusal(self._identity.name_of(m.src), m.clock, str(problem))
            self._channel.note_fault(text)
            reason = torch.tensor(list(text.encode()[:400]), dtype=torch.uint8)
            self._answers.append((m.src, Refused(parts=(reason,), seq=m.seq, version=version)))
            return None
        self._channel.meter.staleness[max(0, version - m.version)] += 1
        return decoded

    async def _save_if_all_have(self) -> None:
        """Save, too, at a step before which all workers have saved that are at work."""
        step = self.savers.complete(self._is_idle)
        if step is not None and self._keeping.checkpoint is not None:
            self._progress.save_at(step)
            await self._keeping.checkpoint()
        if step is not None and self._pool is not None:
            for rank in self._left:
                self._pool.give_up(rank)  # from now on others may have the rest
            self._hand_out()
            await self._flush()

    def _is_idle(self, rank: int) -> bool:
        """Whether a worker has gone, or has nothing to do and waits for it."""
        waits = rank not in self.active if self._pool is None else rank in self._held
        return waits or rank in self._lost or rank in self._left

    # -- who contributes -----------------------------------------------------------------------

    def _track(self, m: Message) -> bool:
        """Record who contributes; whether fewer do than before."""
        if not isinstance(m, (Left, Lost)):
            self._meet(m)
            if m.incarnation:
                self.savers.note_clock(m.src, m.clock)
        elif m.src not in self._lost:
            self._bury(m)
        self.reached.hear(m)
        if isinstance(m, More):
            if m.src in self._held:
                self._answers.append((m.src, Wait(seq=m.seq)))
            self._held[m.src] = m
        elif isinstance(m, (Push, Report, Busy, Where)) and m.src < self._identity.workers:
            self.active.add(m.src)
        if isinstance(m, _CONTRIBUTES) or m.src not in self.active:
            return False
        self.active.discard(m.src)
        return True

    def _meet(self, m: Message) -> None:
        """A peer is there. It may have died and come back before this server was there to be told."""
        if self._ledger.is_successor(m):
            loss = Lost(src=m.src, incarnation=m.incarnation - 1)
            self._mailbox.note(loss)
            self._bury(loss)
            self.active.discard(m.src)
        if m.src in self._lost:
            self._lost.discard(m.src)
            self._mailbox.note(Joined(src=m.src, incarnation=m.incarnation))

    def _bury(self, m: Message) -> None:
        """A peer is gone: accept nothing more from it, and free the batches that a worker left undone."""
        self._held.pop(m.src, None)
        if isinstance(m, Left):
            self._left.add(m.src)
        else:
            self._lost.add(m.src)
            self.reached.lose(m.src)
            self.savers.forget(m.src)
            self._ledger.fence(m.src, m.incarnation + 1)
        is_stopped = isinstance(m, Left) and self.savers.has_saved(m.src)  # and has the rest in a checkpoint
        if self._pool is not None and m.src < self._identity.workers and not is_stopped:
            self._pool.give_up(m.src)

    # -- answers -------------------------------------------------------------------------------

    async def _settle(self, m: Message) -> None:
        """The algorithm has dealt with a message: see to its answer."""
        version = self._progress.version
        if self._pool is not None and m.src < self._identity.workers and isinstance(m, (Push, More, Report)):
            self._pool.commit(m.src, m.clock)
        if isinstance(m, (Push, Report)):
            self.reached.note(m)
            self.samples += m.count if m.src < self._identity.workers else 0.0
        if isinstance(m, Push) and self._ledger.answer_to(m) is None:  # else the algorithm has dropped it
            self._conclude(m, Ack(seq=m.seq, version=version))
        elif isinstance(m, Where):
            where = torch.tensor([*self.reached.where(m.src), len(self.beside)])
            self._answers.append((m.src, Numbers(parts=(where,), seq=m.seq)))
        elif isinstance(m, (Idle, Busy)):  # to say it twice does no harm
            self._answers.append((m.src, Ack(seq=m.seq, version=version)))
        if self._held:
            self._hand_out()
        if self._answers if self._log is None else not self._log.keeps_every_update:
            await self._flush()

    def _hand_out(self) -> None:
        """Answer those who asked for more, where there is more or nothing is left to come."""
        if self._pool is None or not (self._pool.has_free or self._pool.finished):
            return
        if self._pool.finished and not (self.active or self.reached.awaits_any):
            self.reached.end({*self._held, *self._left})
            held, self._held, end = self._held, {}, self._end()
            for m in held.values():
                self._conclude(m, Over(parts=end, seq=m.seq))
        for rank, m in list(self._held.items()):
            if (work := self._pool.take(rank)) is not None:
                (owner, place), clock = work
                del self._held[rank]
                self.active.add(rank)
                self._conclude(m, Grant(parts=(torch.tensor([owner, place, clock]),), seq=m.seq))

    def _end(self) -> tuple[Tensor, ...]:
        """The step at which all save that have done batches of others, after all that they have done."""
        end = self._pool.end if isinstance(self._pool, Pool) else None
        return () if end is None else (torch.tensor([end]),)

    def _conclude(self, m: Message, answer: Message) -> None:
        self._ledger.record(m, answer)
        self._answers.append((m.src, answer))

    async def _flush(self) -> None:
        """Make safe what was done, then send the answers about it."""
        answers, self._answers = self._answers, []
        if self._replaying:
            return
        if self._log is not None:
            self._log.sync()
        for dst, answer in answers:
            await self._channel.send(dst, answer)
