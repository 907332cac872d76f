"""Mutants of membership: the protocol with one thing wrong in it, which the schedules must catch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal.engine import membership
from shoal.engine.group import Group
from shoal.engine.keeper import Keeper, Roster
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Membership
from shoal.engine.state_transfer import StateArrival
from shoal.replicas.batches import Batches

MUTANTS = {}


def mutant(apply):
    """Add a mutant, called as the function that makes it."""
    MUTANTS[apply.__name__] = apply
    return apply


@mutant
def no_epoch_is_checked(patch: pytest.MonkeyPatch) -> None:
    async def found(self, tag, src, needed=()):
        return await self._mailbox.find(tag, self._members[src], needed, self.handlers)

    patch.setattr(Group, "_found", found)
    patch.setattr(Mailbox, "_is_stale", lambda self, m: False)


@mutant
def a_joiner_counts_before_its_state_has_arrived(patch: pytest.MonkeyPatch) -> None:
    admit = Roster.admit

    def at_once(self, rank, incarnation):
        if admitted := admit(self, rank, incarnation):
            self.members |= self.joiners
            self.joiners = {}
        return admitted

    patch.setattr(Roster, "admit", at_once)


@mutant
def what_a_dead_worker_was_dealt_is_lost(patch: pytest.MonkeyPatch) -> None:
    redeal = Batches.redeal
    patch.setattr(Batches, "redeal", lambda self, *to: redeal(self, *to[:3], {}, *to[4:]))


@mutant
def what_one_that_contributed_was_dealt_comes_again(patch: pytest.MonkeyPatch) -> None:
    redeal = Batches.redeal

    def also_of_the_first(
        self: Batches, place: int, workers: int, step: int, undone: Any, *more: Any
    ) -> None:
        since = min(undone.values(), default=step)
        redeal(self, place, workers, step, {0: since, **undone}, *more)

    patch.setattr(Batches, "redeal", also_of_the_first)


@mutant
def the_keeper_has_no_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeper, "_keep", lambda self: None)


@mutant
def a_restarted_keeper_begins_with_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "load", lambda self, state: setattr(self, "epoch", state["epoch"]))


@mutant
def nobody_gives_what_others_lack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_lacks_an_outcome", lambda self: False)


@mutant
def no_roll_is_called(patch: pytest.MonkeyPatch) -> None:
    async def skip(self):
        self._has_called = True

    patch.setattr(Membership, "_call_roll", skip)


@mutant
def an_outcome_is_taken_for_one_of_those_present(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_outcome

    async def wrongly(self, m):
        await note(self, m)
        for number, outcome in self._given.items():
            self._given[number] = dataclasses.replace(outcome, contributors=self.present)

    patch.setattr(Membership, "_note_outcome", wrongly)


@mutant
def a_given_outcome_has_joiners_of_the_wrong_epoch(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_outcome

    async def wrongly(self, m):
        await note(self, m)
        for number, outcome in self._given.items():
            self._given[number] = dataclasses.replace(outcome, dealt=outcome.contributors)

    patch.setattr(Membership, "_note_outcome", wrongly)


@mutant
def joiners_take_part_before_the_edge_that_was_agreed(patch: pytest.MonkeyPatch) -> None:
    made = Membership._made

    def early(self, average, total):
        outcome = made(self, average, total)
        return dataclasses.replace(outcome, dealt=tuple(sorted({*self.present, *self.joiners})))

    patch.setattr(Membership, "_made", early)
    patch.setattr(membership.math, "inf", 0)


@mutant
def nobody_waits_at_the_end(patch: pytest.MonkeyPatch) -> None:
    async def leave(self):
        return

    patch.setattr(Membership, "part", leave)


@mutant
def the_state_lacks_what_is_dealt_again(patch: pytest.MonkeyPatch) -> None:
    state = StateArrival.state

    def without(self):
        whole = state(self)
        whole["deal"]["again"] = whole["deal"]["again"][:0]
        return whole

    patch.setattr(StateArrival, "state", without)


@mutant
def a_new_incarnation_takes_itself_for_the_member_that_died(patch: pytest.MonkeyPatch) -> None:
    change = Membership._change

    async def wrongly(self, m):
        listed = m.parts[0].view(-1, 2)
        listed[listed[:, 0] == self._identity.rank, 1] = self._identity.incarnation
        await change(self, m)

    patch.setattr(Membership, "_change", wrongly)


@mutant
def what_comes_before_the_change_is_dropped(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_present

    async def forgetful(self, m):
        if m.version <= self.epoch:
            await note(self, m)

    patch.setattr(Membership, "_note_present", forgetful)


@mutant
def joiners_are_admitted_after_the_end(patch: pytest.MonkeyPatch) -> None:
    class Never(Roster):
        is_over = property(lambda self: False, lambda self, value: None)

    patch.setattr("shoal.engine.keeper.Roster", Never)
    patch.setattr(Mailbox, "has_left", lambda self, rank: False)


@mutant
def a_joiner_asks_the_keeper_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.engine.edges.ASK_SECONDS", 1e9)


@mutant
def a_lost_member_is_not_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "lose", lambda self, rank: None)


@mutant
def one_that_was_given_up_wrongly_goes_on(patch: pytest.MonkeyPatch) -> None:
    settle = Roster.settle
    patch.setattr(
        Roster, "settle", lambda self, rank, incarnation, epoch: settle(self, rank, incarnation, self.epoch)
    )
