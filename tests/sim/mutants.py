"""Mutants: the protocol with one thing wrong in it. A storm that never catches them would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shoal.core.transport import Message
from shoal.engine import ledger as ledgers
from shoal.engine.channel import Channel
from shoal.engine.ledger import Ledger
from shoal.engine.log import Log
from shoal.engine.mailbox import Mailbox, Question
from shoal.engine.pool import Batch, Pool
from shoal.engine.progress import Progress
from shoal.engine.protocol import Ack, Fewer, Push
from shoal.engine.service import _OURS, _SHOWN, Service
from shoal.engine.variables import Variables
from shoal.sim import Disk
from shoal.vocabulary import gathering

MUTANTS: list[Mutant] = []


@dataclass(frozen=True)
class Mutant:
    """`caught` is the share of 500 seeds, in per cent, that caught it when this was last measured."""

    name: str
    caught: float
    apply: Callable[[pytest.MonkeyPatch], None]
    memory: bool = False  # whether it is about servers that keep snapshots only
    first: int = 0  # the seed to begin with, where only a rare one catches it


def mutant(
    name: str, caught: float, memory: bool = False, first: int = 0
) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def add(apply: Callable[[pytest.MonkeyPatch], None]) -> None:
        MUTANTS.append(Mutant(name, caught, apply, memory, first))

    return add


def without(patch: pytest.MonkeyPatch, **emptied: Any) -> None:
    """Leave something out of what a service saves."""
    state = Service.state
    patch.setattr(Service, "state", lambda self: {**state(self), **emptied})


# -- every update once -------------------------------------------------------------------------------------


@mutant("no dedupe", 93.2)
def no_dedupe(patch: pytest.MonkeyPatch) -> None:
    answer_to = Ledger.answer_to
    patch.setattr(Ledger, "answer_to", lambda self, m: answer_to(self, m) if self.has_fenced(m) else None)


@mutant("only the newest answer is remembered", 3.8)
def window_of_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledgers, "WINDOW", 1)


@mutant("the answer to one push is taken for the answer to another", 39.2)
def any_ack(patch: pytest.MonkeyPatch) -> None:
    take_in = Mailbox._take_in

    def mistaken(self: Mailbox, m: Message) -> bool:
        if m.tag == "ack":
            open_pushes = [
                seq for (dst, seq), q in self._open.items() if dst == m.src and isinstance(q, Push)
            ]
            m.seq = open_pushes[0] if open_pushes else m.seq
        return take_in(self, m)

    patch.setattr(Mailbox, "_take_in", mistaken)


@mutant("no retry", 39.8)
def no_retry(patch: pytest.MonkeyPatch) -> None:
    init = Mailbox.__init__
    patch.setattr(
        Mailbox, "__init__", lambda self, *parts, retry, recovery: init(self, *parts, recovery=recovery)
    )


# -- a server that dies ------------------------------------------------------------------------------------


@mutant("the snapshot has no ledger", 42.6)
def snapshot_without_ledger(patch: pytest.MonkeyPatch) -> None:
    without(patch, ledger={})


@mutant("the ledger dies with its server", 51.6)
def ledger_not_persisted(patch: pytest.MonkeyPatch) -> None:
    conclude = Service._conclude

    def forgetful(self: Service, m: Message, answer: Message) -> None:
        if not self._replaying:
            conclude(self, m, answer)

    without(patch, ledger={})
    patch.setattr(Service, "_conclude", forgetful)


@mutant("the snapshot has no pool", 37.8)
def snapshot_without_pool(patch: pytest.MonkeyPatch) -> None:
    without(patch, pool=None)


@mutant("the snapshot has no requests that are held", 1)
def snapshot_without_held(patch: pytest.MonkeyPatch) -> None:
    without(patch, held=[])


@mutant("the snapshot has no memory of the algorithm", 12.2)
def snapshot_without_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Variables, "state", lambda self: {})


@mutant("the snapshot has no version", 72.2)
def snapshot_without_version(patch: pytest.MonkeyPatch) -> None:
    state = Progress.state
    patch.setattr(Progress, "state", lambda self: {**state(self), "version": 0})


@mutant("answers leave before the log is synced", 3)
def answer_before_sync(patch: pytest.MonkeyPatch) -> None:
    async def flush(self: Service) -> None:
        answers, self._answers = self._answers, []
        if self._replaying:
            return
        for dst, answer in answers:
            await self._channel.send(dst, answer)
        if self._log is not None:
            self._log.sync()

    patch.setattr(Service, "_flush", flush)


@mutant("the log is written after the answer", 9)
def log_after_answer(patch: pytest.MonkeyPatch) -> None:
    accepts, settle = Service._accepts, Service._settle

    async def accepts_unwritten(self: Service, m: Message) -> bool:
        log = self._log
        self._log = None if log is None else Deaf(log)
        try:
            return await accepts(self, m)
        finally:
            self._log = log

    async def settle_and_write(self: Service, m: Message) -> None:
        await settle(self, m)
        await self._flush()
        if self._log is not None and not self._replaying:
            self._log.append(m)

    patch.setattr(Service, "_accepts", accepts_unwritten)
    patch.setattr(Service, "_settle", settle_and_write)


class Deaf:
    """A log that takes no messages."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def append(self, m: Message) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


@mutant("the answer leaves before the algorithm has seen the push", 73)
def answer_before_algorithm(patch: pytest.MonkeyPatch) -> None:
    async def messages(self: Service):  # type: ignore[no-untyped-def]
        async for m in self._incoming():
            if not isinstance(m, _OURS):
                yield m
            elif await self._accepts(m):
                fewer = self._track(m)
                await self._settle(m)
                await self._flush()
                if isinstance(m, _SHOWN) or fewer:
                    yield m if isinstance(m, _SHOWN) else Fewer(src=m.src)

    patch.setattr(Service, "messages", messages)


@mutant("the log is emptied before the snapshot is there", 2.4)
def emptied_too_early(patch: pytest.MonkeyPatch) -> None:
    snapshot = Disk.snapshot

    def hasty(self: Disk, state: dict[str, Any]) -> None:
        self._safe, self._unsafe = [], []
        snapshot(self, state)

    patch.setattr(Disk, "snapshot", hasty)


@mutant("the last record of the log is not read back", 27.2)
def short_replay(patch: pytest.MonkeyPatch) -> None:
    recover = Disk.recover

    def short(self: Disk) -> tuple[Any, list[Message]]:
        state, past = recover(self)
        return state, list(past)[:-1]

    patch.setattr(Disk, "recover", short)


# -- a worker that dies ------------------------------------------------------------------------------------


@mutant("no fencing of a worker that was lost", 8.8)
def no_fencing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "has_fenced", lambda self, m: False)


@mutant("no incarnations", 45.8)
def no_incarnations(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: Mailbox, dst: int, m: Message) -> Question:
        m.seq = self._numbers[dst] = self._numbers.get(dst, 0) + 1
        self._open[dst, m.seq] = m
        await self._channel.send(dst, m)
        return dst, m.seq

    patch.setattr(Mailbox, "ask", ask)
    patch.setattr(Ledger, "has_fenced", lambda self, m: False)
    patch.setattr(Ledger, "is_successor", lambda self, m: False)
    patch.setattr(Ledger, "fence", lambda self, rank, since=0: None)


@mutant("a successor that no notice announced goes unnoticed", 5)
def unnoticed(patch: pytest.MonkeyPatch) -> None:
    meet = Service._meet

    def unsuspecting(self: Service, m: Message) -> None:
        if self._ledger.is_successor(m):
            self._ledger.fence(m.src, m.incarnation)
        meet(self, m)

    patch.setattr(Service, "_meet", unsuspecting)


@mutant("what a lost worker left undone is not given to others", 52.6)
def not_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "give_up", lambda self, rank: None)


@mutant("a batch that is handed out is not written down", 12.4)
def handed_out_blindly(patch: pytest.MonkeyPatch) -> None:
    take = Pool.take

    def blindly(self: Pool, rank: int) -> tuple[Batch, int] | None:
        work = take(self, rank)
        if work is not None:
            self._lots[rank].lent.pop()
        return work

    patch.setattr(Pool, "take", blindly)


@mutant("a server leaves when all workers are lost", 1)
def leaves_early(patch: pytest.MonkeyPatch) -> None:
    async def blind(self: Mailbox) -> bool:
        return False

    patch.setattr(Mailbox, "sees_a_return", blind)


# -- servers that keep snapshots only ----------------------------------------------------------------------


@mutant("a server loses updates in silence", 80.2, memory=True)
def silent_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.engine.service.describe_return", lambda log, name, version: "")


@mutant("a worker goes back in silence", 29.2, memory=True)
def silent_return(patch: pytest.MonkeyPatch) -> None:
    note_fault = Channel.note_fault

    def silent(self: Channel, what: str) -> None:
        if "went back" not in what:
            note_fault(self, what)

    patch.setattr(Channel, "note_fault", silent)


@mutant("who is back does not hear of it", 0.2, memory=True, first=344)
def unheard_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gathering, "RolledBack", Ack)  # which no algorithm is ever shown


@mutant("snapshots come late", 29.4, memory=True)
def late_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "snapshot_is_due", lambda self: self._since_snapshot >= 2 * self._every)
