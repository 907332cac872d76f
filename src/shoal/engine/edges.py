"""Edges: what happens between a round and the next step where workers come and go.

What was dealt to workers that did not contribute is dealt again, to whoever is there now; joiners get the
state of one who has just completed the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.core.errors import ShoalError
from shoal.core.identity import NodeIdentity
from shoal.core.replica import LastDeal, Redeals, Replica, TellsPlace
from shoal.core.transport import Message
from shoal.engine.averages import Averages
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import Change, Dealt, Join, RunOver, Settled, StateHead, StatePart
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Membership
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.progress import Progress
from shoal.engine.round_outcome import RoundOutcome
from shoal.engine.state_transfer import StateArrival, messages

ASK_SECONDS = 1.0
"""How often a joiner asks the keeper again, which may have been away."""

KEEPER_SECONDS = 30.0
"""How long a joiner waits for a keeper that is lost and may be started again."""


class Edges:
    """One worker's edges of rounds. `hand_over` gives its state to a joiner, which calls `take_over`.

    `passes` is the number of passes over the data.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        membership: Membership,
        progress: Progress,
        averages: Averages,
        replica: Replica,
        passes: int | None,
        hand_over: Callable[[], dict[str, Any]],
        take_over: Callable[[dict[str, Any]], None],
    ) -> None:
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self._membership = membership
        self._progress = progress
        self._averages = averages
        self._replica = replica
        self._passes = passes
        self._hand_over = hand_over
        self._take_over = take_over
        self.block_began = 0  # the first step that is in no round whose edge this worker has crossed
        self._started = 0  # averages that had been begun, to be taken later, when it last looked
        self._handed: list[int] = []  # the steps after the blocks whose averages these are
        self._arrival: StateArrival | None = None
        self._is_over = False
        self._place = 0, ""  # after which round, and where this worker was in the data then
        self._places: list[Message] = []  # of others, after rounds that this worker has not completed
        membership.handlers[Dealt().tag] = self._note_place

    async def cross(self) -> int | None:
        """Between two steps: deal with what was heard, and cross the edge if a round was completed.

        Returns the step after the last, if that has changed.
        """
        members = self._membership
        await members.attend()
        self._note_handed_over()
        outcome, end = members.outcome, None
        if outcome is None or not members.since_edge:
            return None
        if self._averages.open:
            self._pass_by()
            return None
        before, undone = members.dealt, self._undone()
        if undone or outcome.dealt != before:
            came = members.deal_to(outcome.dealt)
            end = self._deal_again(undone, [before.index(r) if r in before else None for r in members.dealt])
            await self._compare_places(outcome.contributors[0])
            for number, rank in enumerate(came):
                if outcome.contributors[number % len(outcome.contributors)] == self._identity.rank:
                    await self._give_state(rank)
        self._begin_block()
        return end

    def _note_handed_over(self) -> None:
        """A block has just ended if an average was begun since the last look, to be taken later."""
        if self._started != self._averages.started:
            self._started = self._averages.started
            self._handed.append(self._progress.t)

    def _pass_by(self) -> None:
        """Another average is under way. If nobody came or went, only what is not merged yet moves on."""
        rounds = self._membership.since_edge
        if not self._membership.is_changing and len(self._handed) == len(rounds) + self._averages.open:
            self.block_began = self._handed[len(rounds) - 1]
            del self._handed[: len(rounds)]
            rounds.clear()

    def _undone(self) -> dict[int, range]:
        """The steps of those who are absent, by their places, from the first round that they were not in."""
        rounds, t = self._membership.since_edge, self._progress.t
        begins = [self.block_began, *self._handed[:-1]]
        if len(begins) != len(rounds):  # a block took several rounds
            begins = [self.block_began] * len(rounds)
        missed = {
            place: next((n for n, came in enumerate(rounds) if rank not in came), None)
            for place, rank in enumerate(self._membership.dealt)
        }
        return {place: range(begins[n], t) for place, n in missed.items() if n is not None}

    def _begin_block(self) -> None:
        self._membership.since_edge.clear()
        self.go_on(self._progress.block_began)

    def go_on(self, began: int, handed: Sequence[int] = ()) -> None:
        """The first step that is not merged is `began`.

        Averages of blocks before the steps `handed` were under way in a checkpoint, and are begun again.
        """
        self.block_began, self._handed = began, list(handed)
        self._started = self._averages.started + len(handed)

    @property
    def blocks(self) -> list[int]:
        """The first step that is not merged, and the ends of the blocks whose averages are under way."""
        return [self.block_began, *self._handed]

    def _deal_again(self, undone: dict[int, range], was: Sequence[int | None]) -> int | None:
        """Deal what is left of the data to those who are there, with what absent ones left undone."""
        if not isinstance(self._replica, Redeals):
            return None
        dealt, t = self._membership.dealt, self._progress.t
        place = dealt.index(self._identity.rank)
        holds = self._progress.block_began < t
        self._replica.redeal(place, len(dealt), t, LastDeal(undone, was=was if holds else None))
        return None if self._passes is None else self._replica.end_of(self._passes)

    async def _compare_places(self, first: int) -> None:
        """Tell the first of those who contributed where this worker is in the data: all must be there."""
        if not isinstance(self._replica, TellsPlace):
            return
        place, round = self._replica.place_in_data, self._membership.completed
        if self._identity.rank == first:
            self._place = round, place
            self._check_places()
            return
        letters = torch.frombuffer(bytearray(place.encode()), dtype=torch.uint8)
        await self._channel.tell(first, Dealt(parts=(letters,), seq=round, version=self._membership.epoch))

    async def _note_place(self, m: Message) -> None:
        self._places.append(m)
        self._check_places()

    def _check_places(self) -> None:
        """Raise ShoalError if somebody is elsewhere in the data after the same round."""
        round, place = self._place
        for m in [m for m in self._places if m.seq <= round]:
            self._places.remove(m)
            theirs = bytes(m.body.tolist()).decode()
            if m.seq == round and theirs != place:
                me = self._identity
                raise ShoalError(
                    f"{me.name_of(m.src)} is at {theirs}, {me.name} at {place}: they cannot deal again what "
                    "a killed worker left undone. Take equally many batches for a step at every worker"
                )

    async def _give_state(self, rank: int) -> None:
        members = self._membership
        assert members.outcome is not None
        state = self._hand_over() | {"completed": members.completed, "outcome": vars(members.outcome)}
        for m in messages(state, members.epoch):
            await self._channel.send(rank, m)

    # -- joining -------------------------------------------------------------------------------

    async def enter(self) -> int | None:
        """Wait until this joiner has its state and is a member. Returns the step after the last.

        Raises RunIsOver if the run ends first.
        """
        members, keeper, asks_at = self._membership, self._identity.keeper, self._channel.waited
        handlers = {
            **members.handlers,
            Change().tag: self._note_change,
            StateHead().tag: self._note_head,
            StatePart().tag: self._note_part,
            RunOver().tag: self._note_end,
        }
        self._arrival = None
        while members.is_joining:
            if (
                self._is_over
                or self._mailbox.has_left(keeper)
                or self._mailbox.lost_for(keeper) > KEEPER_SECONDS
            ):
                raise RunIsOver
            if self._channel.waited >= asks_at:
                await self._channel.tell(keeper, Join(seq=int(members.may_get_state), version=members.epoch))
                asks_at = self._channel.waited + ASK_SECONDS
            await self._mailbox.attend(handlers, asks_at - self._channel.waited)
        return self._deal_again({}, range(len(members.dealt)))

    async def _take_part(self) -> None:
        """Once the state is whole: before the next message, which may begin another epoch."""
        here, members = self._arrival, self._membership
        if here is None or not here.is_whole or here.epoch != members.epoch:
            return
        self._arrival = None
        state = here.state()
        self._take_over(state)
        members.enter(state["completed"], RoundOutcome.of_state(state["outcome"], self._replica.x))
        self._begin_block()
        await members.reports.tell(Settled(version=members.epoch))

    async def _note_change(self, m: Message) -> None:
        await self._membership.handlers[m.tag](m)
        await self._take_part()

    async def _note_head(self, m: Message) -> None:
        if m.version >= self._membership.epoch:  # it may come before the keeper's word of that epoch
            self._arrival = StateArrival(m)
            await self._take_part()

    async def _note_part(self, m: Message) -> None:
        if self._arrival is not None and m.version == self._arrival.epoch:
            self._arrival.add(m)
            await self._take_part()

    async def _note_end(self, m: Message) -> None:
        self.close()

    def close(self) -> None:
        """Nobody can join any more: a worker has come to the end."""
        self._is_over = True
