"""Keeper: decides who is a member of a run whose workers come and go. It decides changes alone.

Within an epoch nobody asks it anything, so that training goes on while it is away. What it decided is in its
log before anybody hears of it: a keeper that is restarted goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import Change, Finished, Join, Leaves, RunOver, Settled, Suspects
from shoal.engine.log import Log
from shoal.engine.mailbox import Mailbox
from shoal.engine.protocol import Joined, Left, Lost


class Roster:
    """Who is in the run: the epoch, its members, who have state, and its joiners, who have none yet.

    Both are by rank, with the incarnation. A joiner is one until it says that it has state: the others may
    know sooner. Below `least` members and joiners together nothing changes, until the run is over.
    """

    def __init__(self, first: Iterable[int], least: int = 1) -> None:
        self.epoch = 0
        self.members = dict.fromkeys(first, 0)
        self.joiners: dict[int, int] = {}
        self.is_over = False  # whether a worker has finished: nobody may join any more
        self.has_changed = False
        self.evicted: set[int] = set()  # who may not know that they are no longer in it
        self._least = least
        self._let_in: dict[int, int] = {}  # who joined -> the first epoch that lists it

    def lose(self, rank: int) -> None:
        """That worker has vanished, or others cannot reach it."""
        self.members.pop(rank, None)
        self.joiners.pop(rank, None)
        self.evicted.add(rank)
        self.has_changed = True

    def suspect(self, rank: int, suspected: int, epoch: int) -> None:
        """That worker lost its connection to another in this epoch, and needs one without it.

        An older suspicion may be of somebody who has come back since, and so may one of whom the next epoch
        lets in. Of two that suspect each other, the first to say so goes on.
        """
        if epoch == self.epoch and rank in self.members and self._let_in.get(suspected, 0) <= epoch:
            self.lose(suspected)

    def leave(self, rank: int) -> None:
        """That worker has left in order, at its end unless it was let go before.

        Members may be waiting to hear from a joiner whether it has state: they need an epoch without it.
        """
        self.is_over = self.is_over or rank in self.members or rank in self.joiners
        self.members.pop(rank, None)
        self.has_changed |= self.joiners.pop(rank, None) is not None

    def admit(self, rank: int, incarnation: int) -> bool:
        """That process wants to join; whether it may."""
        if self.holds(rank, incarnation):
            return True  # it asks again; others may have given it its state by now
        if self.is_over or not (self.members or self.joiners):
            return False
        self.lose(rank)
        self.joiners[rank] = incarnation
        self._let_in[rank] = self.epoch + 1
        return True

    def holds(self, rank: int, incarnation: int) -> bool:
        """Whether that process is in it."""
        return self.joiners.get(rank) == incarnation or self.members.get(rank) == incarnation

    def settle(self, rank: int, incarnation: int, epoch: int) -> None:
        """That joiner has had its state since that epoch: if it was let in by then it has missed no round."""
        if self.joiners.get(rank) == incarnation and self._let_in[rank] <= epoch:
            self.members[rank] = self.joiners.pop(rank)

    @property
    def listed_joiners(self) -> set[int]:
        """Those that members know of, and may have given state."""
        return {rank for rank in self.joiners if self._let_in[rank] <= self.epoch}

    @property
    def is_due(self) -> bool:
        """Whether there is a change to tell of."""
        return self.has_changed and (self.is_over or len(self.members) + len(self.joiners) >= self._least)

    @property
    def shortage(self) -> str:
        """Why there is no change to tell of although there was one."""
        there = len(self.members) + len(self.joiners)
        return f"training waits: it needs {self._least} workers, and {there} are there"

    def begin_epoch(self) -> None:
        """Make what has changed a new epoch."""
        self.epoch += 1
        self.has_changed = False

    @property
    def lists(self) -> tuple[list[tuple[int, int]], ...]:
        """Members and joiners with their incarnations, and joiners with the epochs that let them in."""
        let_in = [(rank, self._let_in[rank]) for rank in sorted(self.joiners)]
        return sorted(self.members.items()), sorted(self.joiners.items()), let_in

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "epoch": self.epoch,
            "members": self.members,
            "joiners": self.joiners,
            "let_in": self._let_in,
            "is_over": self.is_over,
            "has_changed": self.has_changed,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.epoch, self.is_over = state["epoch"], state["is_over"]
        self.members, self.joiners = dict(state["members"]), dict(state["joiners"])
        self._let_in = dict(state["let_in"])
        self.has_changed = state["has_changed"]


class Keeper:
    """The node that keeps the roster. It has no parameters.

    If it `relays` the workers' messages, those under way are lost with it: its successor begins a new epoch,
    in which the workers send them again. It calls `on_wait` when there are fewer than `least` workers, and
    the others wait for more.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        log: Log | None = None,
        least: int = 1,
        relays: bool = False,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.identity = identity
        self.channel = channel
        self.mailbox = mailbox
        self.roster = Roster(identity.first_workers, least)
        self._log = log
        self._relays = relays
        self._on_wait = on_wait
        self._stateless: set[int] = set()  # who can get no state: said in this epoch, with no member there
        self._has_told = True  # whether every member knows of the present epoch

    async def live(self) -> None:
        """Keep the roster until every worker has gone."""
        if self._log is not None and self.identity.incarnation:
            saved, _ = self._log.recover()
            if saved is not None:
                self.roster.load(saved)
            self.roster.evicted.update(range(self.identity.workers))
            self._has_told = False  # the one before may have died in the middle of telling
            self.roster.has_changed |= self._relays
        while await self._may_go_on():
            if self.roster.is_due:
                self.roster.begin_epoch()
                self._keep()
                self._has_told = False
                self._stateless.clear()
            there = {*self.roster.members, *self.roster.joiners}
            if not self._has_told:
                await self._tell(there)
                self._has_told = True
            elif self.roster.has_changed:
                self._on_wait(self.roster.shortage)
            await self._let_know(self.roster.evicted - there)
            self.roster.evicted.clear()
            await self._hear(await self.mailbox.next())
            while self.mailbox.has_arrived():
                await self._hear(await self.mailbox.next())
        for rank in self.roster.joiners:
            await self.channel.tell(rank, RunOver())
        if self._log is not None:
            self._log.close()

    @property
    def _is_cut_off(self) -> bool:
        """Whether no member can be reached: all are dead, or they go on and this keeper is cut off."""
        return all(map(self.mailbox.has_lost, self.roster.members))

    async def _may_go_on(self) -> bool:
        """Whether somebody may have the model, and be there, or come back: then this waits for a message.

        A joiner may have it, and be too busy to say so, until it says that it has none and can get none.
        """
        if not self._is_cut_off:
            self._stateless.clear()
            return True
        able = self.roster.members.keys() | self.roster.listed_joiners - self._stateless
        if any(not self.mailbox.has_lost(rank) for rank in able):
            return True
        return bool(able) and await self.mailbox.sees_a_return()

    def _has_gone_since(self, m: Message) -> bool:
        """Whether who said this is dead by now, or cut off: then it says so again when it is back."""
        rank = m.src
        return self.mailbox.has_lost(rank) or m.incarnation < self.mailbox.incarnations.get(rank, 0)

    async def _hear(self, m: Message) -> None:
        roster, rank = self.roster, m.src
        if m.tag == Suspects().tag:
            if not self._has_gone_since(m):
                roster.suspect(rank, m.seq, m.version)
        elif isinstance(m, Joined):
            await self._tell([rank])  # what it was told meanwhile is lost
        elif isinstance(m, Left):
            roster.leave(rank)
        elif m.tag == Join().tag:
            if not roster.admit(rank, m.incarnation):
                await self.channel.tell(rank, RunOver())
            elif not roster.has_changed:
                await self._tell([rank])
            if self._is_cut_off and m.version == roster.epoch and not m.seq:
                self._stateless.add(rank)
            else:
                self._stateless.discard(rank)
        elif m.tag == Leaves().tag:
            await self._let_go(m)
        elif m.tag == Settled().tag:
            roster.settle(rank, m.incarnation, m.version)
            self._keep()
            if not roster.holds(rank, m.incarnation):  # it was dropped before, while it asked to join
                await self._tell([rank])
        elif m.tag == Finished().tag:
            roster.is_over = True
            self._keep()
        elif not isinstance(m, Lost):  # if a member is, the others say so: this keeper itself may be cut off
            self.channel.note_fault(f"the keeper knows no message {m.tag!r}")

    async def _let_go(self, m: Message) -> None:
        """A worker wants to leave. If too few would be left, there is no new epoch to wait for."""
        if self._has_gone_since(m):
            return
        self.roster.lose(m.src)
        if not self.roster.is_due:
            await self.channel.tell(m.src, RunOver())

    async def _let_know(self, dropped: set[int]) -> None:
        """Tell those who are no longer in it: who leaves goes then, and who was cut off joins again."""
        if dropped and self.roster.has_changed:  # in no epoch yet
            self._keep()
        await self._tell(dropped)

    def _keep(self) -> None:
        if self._log is not None:
            self._log.snapshot(self.roster.state())

    async def _tell(self, ranks: Iterable[int]) -> None:
        roster = self.roster
        parts = tuple(torch.tensor(pairs, dtype=torch.int64).reshape(-1) for pairs in roster.lists)
        for rank in sorted(ranks):
            await self.channel.tell(rank, Change(parts=parts, version=roster.epoch))
