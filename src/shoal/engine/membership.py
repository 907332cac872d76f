"""Membership: the workers that average among themselves, while some go and others come.

The averages of a run are its rounds, counted from 1. Every worker keeps what it brought to a round until the
round is complete, and what came of the last ones. When the keeper tells of a change, a new epoch begins, and
all in it call the roll: each says how many rounds it has completed. Who lacks one that another has gets its
result from there; if nobody has it, the members form it again from what they kept. So no step of those who
are left is lost, and all have the same model. Joiners answer, too: one may have state, and the keeper not
know it yet.

Batches are dealt to a list of workers that changes at the edge of a round alone: between the average and the
next step. What was dealt to a worker that did not contribute is dealt again. Joiners get their state at such
an edge, from a worker that has just completed a round, and take part from there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, cast

from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.transport import JOINED, LOST, Message, Regroups, offers
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import (
    STATELESS,
    TAGS,
    Change,
    Finished,
    Leaves,
    Present,
    RoundResult,
    Settled,
)
from shoal.engine.ends import Ends
from shoal.engine.group import Group
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership_errors import Demoted, EpochChanged, LeftEarly, RunIsOver
from shoal.engine.reports import Reports
from shoal.engine.round_outcome import RoundOutcome

Formation: TypeAlias = Callable[[], Awaitable[tuple[Tensor, float]]]
"""Forms the average of what this worker brings, over the group as it is then: average and total weight."""

CHANGE_SECONDS = 1.0
"""How long a worker waits for a change when a member has left before the end: nobody takes its place."""


class Membership:
    """One worker's view of the workers that are there.

    `present` form the next round; `dealt` are those whom the batches since the last edge were dealt to.
    """

    def __init__(self, identity: NodeIdentity, channel: Channel, mailbox: Mailbox, group: Group) -> None:
        self.epoch = self.completed = 0  # of the keeper's lists; of rounds
        self.present = self.dealt = everybody = tuple(identity.first_workers)
        self.joiners: tuple[int, ...] = ()  # of this epoch
        self.size = len(everybody)  # contributors of the last round; after its edge, those who are dealt to
        self.is_joining = identity.incarnation > 0
        self.since_edge: list[tuple[int, ...]] = []  # the contributors of each round since the last edge
        self.keeps = 1  # outcomes of so many rounds: others may be so many behind
        self._identity, self._channel, self._mailbox, self._group = identity, channel, mailbox, group
        self._me = identity.rank, identity.incarnation  # not one who died and had this rank
        self._roll: dict[int, int] = {}  # rank -> rounds completed
        self._state_of = 0  # the epoch in which this worker got its state
        self._has_called = True  # whether the roll of this epoch is complete
        self._joins_at = math.inf  # the round after which the joiners of this epoch take part
        self._early_change: Message | None = None  # lists workers that this one has not heard of
        self._early: deque[Message] = deque()  # of epochs that this worker has not heard of
        self._outcomes: dict[int, RoundOutcome] = {}
        self._given: dict[int, RoundOutcome] = {}  # by another member
        self._ends = Ends()
        self._is_forming = False
        self._listed = dict.fromkeys(everybody, 0)  # rank -> incarnation, of those in this epoch
        self.reports = Reports(identity.keeper, channel)
        self.recoveries: list[float] = []  # seconds from a disturbance in a round to the round's end
        self._disturbed_at: float | None = None
        self.handlers = {
            Change().tag: self._change,
            Present().tag: self._note_present,
            RoundResult().tag: self._note_outcome,
            Finished().tag: self._note_finished,
            Leaves().tag: self._ends.note_goodbye,
            LOST: self._note_loss,
            JOINED: self._note_return,
        }
        mailbox.shown = (LOST, JOINED)
        mailbox.incarnations |= {**channel.transport.incarnations, identity.rank: identity.incarnation}
        group.handlers, transport = self.handlers, channel.transport
        self._rings = cast(Regroups, transport) if offers(type(transport), Regroups) else None
        if identity.rank in everybody:
            self._regroup()

    # -- a round -------------------------------------------------------------------------------

    async def form(self, formation: Formation) -> tuple[Tensor, float]:
        """The outcome of the next round: the average over those present, and the total weight."""
        outcome = None
        while outcome is None:
            outcome = await self._attempt(formation)
        self.completed += 1
        if self._disturbed_at is not None:
            self.recoveries.append(self._channel.now() - self._disturbed_at)
            self._disturbed_at = None
        self.size = len(outcome.contributors)
        self.since_edge.append(outcome.contributors)
        self._outcomes[self.completed] = outcome
        self._outcomes = {n: o for n, o in self._outcomes.items() if n > self.completed - self.keeps}
        return outcome.average, outcome.total

    async def _attempt(self, formation: Formation) -> RoundOutcome | None:
        """The outcome of the next round; None if somebody came or went meanwhile."""
        self._is_forming = True
        try:
            await self._call_roll()
            given = self._given.pop(self.completed + 1, None)
            if given is None:
                self._check_all_come()
                return self._made(*await formation())
            return given
        except EpochChanged:
            self._note_disturbance()
            return None
        except LeftEarly:
            raise
        except PeerLost as lost:
            self._note_disturbance()
            await self._await_change(lost)
            return None
        finally:
            self._is_forming = False

    def _check_all_come(self) -> None:
        """Raise LeftEarly if a member has ended that would have to bring something to the next round."""
        for rank in self.present:
            if self._ends.rounds.get(rank, math.inf) <= self.completed:
                raise LeftEarly(
                    f"{self._identity.name_of(rank)} ended before {self._identity.name}, which waits for it "
                    f"in average {self.completed + 1}: all workers must take equally many steps."
                )

    def _note_disturbance(self) -> None:
        if self._disturbed_at is None:
            self._disturbed_at = self._channel.now()

    def _made(self, average: Tensor, total: float) -> RoundOutcome:
        joins = self.joiners if self.completed + 1 >= self._joins_at else ()
        return RoundOutcome(average, total, self.present, tuple(sorted({*self.present, *joins})))

    async def _call_roll(self) -> None:
        """Wait until all in this epoch have said where they are, and who is behind has what it lacks."""
        while not self._has_called or self._lacks_an_outcome():
            await self.wait("present")

    def _lacks_an_outcome(self) -> bool:
        return self._furthest > self.completed and self.completed + 1 not in self._given

    @property
    def _furthest(self) -> int:
        return max(self._roll.values(), default=self.completed)

    async def wait(self, what: str, for_ever: bool = False) -> None:
        """Wait for a message of the membership and deal with it. Raises EpochChanged.

        Raises RunIsOver if only a change would help, and the keeper has left: the others have finished.
        """
        self._mailbox.has_arrived()  # the word that the keeper has left may be there already
        self._end_if_over()
        await self._mailbox.attend_to(what, self.handlers, for_ever)

    def _end_if_over(self) -> None:
        if self.reports.suspected and self._mailbox.has_left(self._identity.keeper):
            self.is_joining = True
            raise RunIsOver

    async def _await_change(self, lost: PeerLost) -> None:
        """A member is lost, or cannot be reached: wait until the keeper has said who goes on.

        It may be waiting for others to join. Where somebody is only silent, it may have no reason to say
        anything: raises what was `lost` when that has lasted for as long as one waits for a message.
        """
        epoch, left = self.epoch, set(filter(self._has_left_early, self.present))
        await self.reports.suspect({*self.present} & self._mailbox.gone.keys() - left)
        try:
            if left:  # in order, so that no change may follow
                await self._mailbox.let_pass(CHANGE_SECONDS, self.handlers)
                self._end_if_over()
                raise lost
            while self.epoch == epoch:
                await self.wait("change", for_ever=bool(self.reports.suspected))
        except EpochChanged:
            return
        except PeerLost:
            raise lost from None

    def _has_left_early(self, rank: int) -> bool:
        """Whether a member has ended in order, and not a successor that came too late to be one.

        One that has said goodbye has not: there will be an epoch without it.
        """
        known = self._mailbox.incarnations.get(rank, 0)
        has_left = self._mailbox.has_left(rank) and known == self._listed.get(rank, 0)
        return has_left and self._ends.goodbyes.get(rank) != known

    # -- what is heard -------------------------------------------------------------------------

    async def attend(self) -> None:
        """Deal with what has arrived, without waiting: between two steps."""
        await self._mailbox.attend(self.handlers, 0.0)

    async def _change(self, m: Message) -> None:
        listed = [[(rank, number) for rank, number in part.view(-1, 2).tolist()] for part in m.parts]
        known, is_in = self._mailbox.incarnations, self._me in (*listed[0], *listed[1])
        if m.version <= self.epoch and (is_in or self.is_joining or m.version < self.epoch):
            return  # else it was dropped, and too few are left to begin another epoch
        is_early = any(incarnation > known.get(rank, 0) for rank, incarnation in (*listed[0], *listed[1]))
        if is_early and not self.is_joining:  # a joiner never hears of those that died before it came
            self._early_change = m  # until this worker has heard that they are back
            return
        was_joining = self.is_joining
        self._begin_epoch(m.version, *listed)
        if self._is_listed:
            await self._answer_roll()
        if self.is_joining:
            if not was_joining:
                raise Demoted
            return
        await self._suspect_absent()
        if self._is_forming:
            raise EpochChanged

    def _begin_epoch(self, epoch: int, *lists: list[tuple[int, int]]) -> None:
        """Go by what the keeper says now."""
        self.epoch, self._early_change = epoch, None
        members, joiners, let_in = lists
        self.present, self.joiners = (tuple(rank for rank, _ in pairs) for pairs in (members, joiners))
        self._listed = {pair[0]: pair[1] for pair in (*members, *joiners)}
        self._mailbox.fence(self.epoch, exempt=TAGS)
        self._given.clear()
        self.reports.begin_epoch(epoch)
        self._joins_at = math.inf
        self._ends.let_in(let_in)
        is_back = self._me in joiners and dict(let_in)[self._me[0]] <= self._state_of
        self.is_joining = not (self._me in members or (is_back and not self.is_joining))

    @property
    def _is_listed(self) -> bool:
        """Whether this epoch lists this worker itself, and not one before it that had its rank."""
        return self._me in self._listed.items()

    async def _answer_roll(self) -> None:
        """Say where this worker is to all who are there in this epoch."""
        me, completed = self._identity.rank, STATELESS if self.is_joining else self.completed
        ended = {rank: rounds for rank, rounds in self._ends.rounds.items() if rank in self._listed}
        self._roll, self._has_called = {**ended, me: completed}, False
        if me in self.joiners and not self.is_joining:  # it has missed no round: all wait for its answer
            await self.reports.tell(Settled(version=self.epoch))
        for rank in sorted(self._listed.keys() - {me}):
            await self._channel.tell(rank, Present(seq=completed, version=self.epoch))
        early, self._early = self._early, deque()
        for earlier in early:
            await self.handlers[earlier.tag](earlier)
        await self._see_to_roll()

    async def _suspect_absent(self) -> None:
        """Suspect those in the list who have gone, or are back as another incarnation, since it was made."""
        known, gone, listed = self._mailbox.incarnations, self._mailbox.gone, self._listed.items()
        await self.reports.suspect(rank for rank, n in listed if n < known.get(rank, 0) or rank in gone)

    async def _note_loss(self, m: Message) -> None:
        """Messages of this epoch may be lost for good, even if the peer is there again by now."""
        if not self.is_joining and m.src in self._listed:
            await self.reports.suspect([m.src])

    async def _note_return(self, m: Message) -> None:
        if m.src == self._identity.keeper:
            await self.reports.repeat()
        elif self.is_joining and self._is_listed:  # its answer may be lost; its suspicion counts for nothing
            await self._channel.tell(m.src, Present(seq=STATELESS, version=self.epoch))
        if self._early_change is not None:
            await self._change(self._early_change)

    async def _note_present(self, m: Message) -> None:
        if m.version > self.epoch:
            self._early.append(m)
        elif m.version == self.epoch:
            self._roll[m.src] = m.seq
            await self._see_to_roll()

    async def _see_to_roll(self) -> None:
        """Once all have answered: the first of those who are furthest gives the others what they lack."""
        if self.is_joining or self._has_called or self._listed.keys() - self._roll.keys():
            return
        self._has_called = True
        self._joins_at = self._furthest + 1
        self.joiners = tuple(rank for rank in self.joiners if self._roll[rank] == STATELESS)
        self.present = tuple(sorted(self._listed.keys() - set(self.joiners)))
        self._regroup()
        if self._identity.rank != next(rank for rank in self.present if self._roll[rank] == self._furthest):
            return
        for rank in self.present:
            for number in range(self._roll[rank] + 1, self._furthest + 1):
                await self._channel.send(rank, self._outcomes[number].message(number, self.epoch))

    async def _note_outcome(self, m: Message) -> None:
        if m.version > self.epoch:
            self._early.append(m)
        elif m.version == self.epoch and not self.is_joining:
            self._given[m.seq] = RoundOutcome.of(m, self._group.x)

    async def _note_finished(self, m: Message) -> None:
        if not self._ends.note(m):
            return
        if m.src in self._listed:  # it may have left before it heard of this epoch: it needs nothing any more
            self._roll.setdefault(m.src, m.seq)
            await self._see_to_roll()
        if self._is_forming:
            self._check_all_come()

    # -- edges ---------------------------------------------------------------------------------

    @property
    def outcome(self) -> RoundOutcome | None:
        """What came of the last round; None before the first."""
        return self._outcomes.get(self.completed)

    @property
    def is_changing(self) -> bool:
        """Whether, by a round whose edge is still to come, somebody has gone or is to take part."""
        last = self.outcome if self.since_edge else None
        return last is not None and not (last.contributors == last.dealt == self.dealt)

    def deal_to(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Deal batches to these from now on; the joiners who take part from now on.

        If there was another change since the round, that one decides when joiners do.
        """
        self.dealt = tuple(ranks)
        self.size = len(ranks)
        if self.completed < self._joins_at:
            return ()
        came, self.joiners = self.joiners, ()
        if came:
            self.present = tuple(sorted({*self.present, *came}))
            self._regroup()
        return came

    def enter(self, completed: int, outcome: RoundOutcome) -> None:
        """This joiner has the state after that many rounds, the last with that outcome. It takes part now."""
        self.is_joining, self._state_of = False, self.epoch
        self.completed, self._outcomes = completed, {completed: outcome}
        self.present = self.dealt = outcome.dealt
        self.size = len(outcome.dealt)
        self.joiners, self.since_edge = (), []
        self._roll, self._has_called = {}, True
        self._regroup()

    @property
    def may_get_state(self) -> bool:
        """Whether somebody that may have state knows of this joiner and is there, as far as it can see."""
        known, gone = self._mailbox.incarnations, self._mailbox.gone
        return self._is_listed and any(
            self._roll.get(rank) != STATELESS and rank not in gone and known.get(rank, 0) <= incarnation
            for rank, incarnation in self._listed.items()
        )

    def _regroup(self) -> None:
        self._group.regroup(self.present, self.epoch)
        if self._rings is not None:
            self._rings.regroup(self.present, self.epoch, self._is_disturbed)

    def _is_disturbed(self) -> bool:
        """Whether somebody has gone, or the keeper tells of a change, and an all-reduce cannot go on."""
        waits = self._mailbox.holds(Change().tag, [self._identity.keeper], None, after=self.epoch)
        return waits or any(rank in self._mailbox.gone for rank in self.present)

    @property
    def others(self) -> list[int]:
        """The other members."""
        return [rank for rank in self.present if rank != self._identity.rank]

    # -- the end -------------------------------------------------------------------------------

    async def part(self) -> None:
        """Return when every member has all outcomes: until then one may need this worker's."""
        told = None
        while told is None or not self._has_called or any(r not in self._ends.rounds for r in self.others):
            here = self.epoch, self.present
            if told != here:  # in each epoch anew: with a connection, what was told before may be lost
                told = here
                for rank in (*self.others, self._identity.keeper):
                    await self._channel.tell(rank, Finished(seq=self.completed, version=self.epoch))
            else:
                await self.wait("finished")
