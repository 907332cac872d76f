"""Mutants of membership: the protocol with one thing wrong in it, which the schedules must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.replica import LastDeal
from shoal.core.transport import LOST
from shoal.engine.edges import Edges
from shoal.engine.elastic_messages import STATELESS
from shoal.engine.ends import Ends
from shoal.engine.engine import Engine
from shoal.engine.goodbye import Goodbye
from shoal.engine.group import Group
from shoal.engine.keeper import Keeper, Roster
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Membership
from shoal.engine.reports import Reports
from shoal.engine.state_transfer import StateArrival
from shoal.replicas.batches import Batches

MUTANTS = {}
"""Functions that make a mutant, by name, each with a schedule to try first: a short one that catches it."""


def mutant(first: int):
    """Add a mutant, called as the function that makes it."""

    def add(apply):
        MUTANTS[apply.__name__] = apply, first
        return apply

    return add


@mutant(first=31)
def no_epoch_is_checked(patch: pytest.MonkeyPatch) -> None:
    def take(self, tag, src):
        return self._mailbox.find(tag, self._members[src], self._members, self.handlers)

    def recv(self, tag, src):
        return self._mailbox.find(tag, self._members[src], (), self.handlers)

    patch.setattr(Group, "take", take)
    patch.setattr(Group, "recv", recv)
    patch.setattr(Mailbox, "_is_stale", lambda self, m: False)


@mutant(first=149)
def a_joiner_counts_before_its_state_has_arrived(patch: pytest.MonkeyPatch) -> None:
    admit = Roster.admit

    def at_once(self, rank, incarnation):
        if admitted := admit(self, rank, incarnation):
            self.members |= self.joiners
            self.joiners = {}
        return admitted

    patch.setattr(Roster, "admit", at_once)


@mutant(first=282)
def what_a_dead_worker_was_dealt_is_lost(patch: pytest.MonkeyPatch) -> None:
    redeal = Batches.redeal
    patch.setattr(Batches, "redeal", lambda self, *to: redeal(self, *to[:3], replace(to[3], undone={})))


@mutant(first=165)
def what_one_that_contributed_was_dealt_comes_again(patch: pytest.MonkeyPatch) -> None:
    redeal = Batches.redeal

    def also_of_the_first(self: Batches, place: int, workers: int, step: int, last: LastDeal) -> None:
        steps = next(iter(last.undone.values()), ())
        redeal(self, place, workers, step, replace(last, undone={0: steps, **last.undone}))

    patch.setattr(Batches, "redeal", also_of_the_first)


@mutant(first=338)
def the_keeper_has_no_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeper, "_keep", lambda self: None)


@mutant(first=276)
def a_restarted_keeper_begins_with_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "load", lambda self, state: setattr(self, "epoch", state["epoch"]))


@mutant(first=322)
def nobody_gives_what_others_lack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_lacks_an_outcome", lambda self: False)


@mutant(first=13)
def no_roll_is_called(patch: pytest.MonkeyPatch) -> None:
    async def skip(self):
        self._has_called = True

    patch.setattr(Membership, "_call_roll", skip)


@mutant(first=322)
def an_outcome_is_taken_for_one_of_those_present(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_outcome

    async def wrongly(self, m):
        await note(self, m)
        for number, outcome in self._given.items():
            self._given[number] = replace(outcome, contributors=self.present)

    patch.setattr(Membership, "_note_outcome", wrongly)


@mutant(first=23)
def a_given_outcome_has_joiners_of_the_wrong_epoch(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_outcome

    async def wrongly(self, m):
        await note(self, m)
        for number, outcome in self._given.items():
            self._given[number] = replace(outcome, dealt=outcome.contributors)

    patch.setattr(Membership, "_note_outcome", wrongly)


@mutant(first=23)
def joiners_take_part_before_the_edge_that_was_agreed(patch: pytest.MonkeyPatch) -> None:
    see = Membership._see_to_roll

    async def by_its_own_count(self):
        await see(self)
        self._joins_at = min(self._joins_at, self.completed + 1)

    patch.setattr(Membership, "_see_to_roll", by_its_own_count)


@mutant(first=322)
def nobody_waits_at_the_end(patch: pytest.MonkeyPatch) -> None:
    async def leave(self):
        return

    patch.setattr(Membership, "part", leave)


@mutant(first=31)
def the_state_lacks_what_is_dealt_again(patch: pytest.MonkeyPatch) -> None:
    state = StateArrival.state

    def without(self):
        whole = state(self)
        whole["deal"]["again"] = whole["deal"]["again"][:0]
        return whole

    patch.setattr(StateArrival, "state", without)


@mutant(first=167)
def a_new_incarnation_takes_itself_for_the_member_that_died(patch: pytest.MonkeyPatch) -> None:
    change = Membership._change

    async def wrongly(self, m):
        listed = m.parts[0].view(-1, 2)
        listed[listed[:, 0] == self._identity.rank, 1] = self._identity.incarnation
        await change(self, m)

    patch.setattr(Membership, "_change", wrongly)


@mutant(first=9)
def what_comes_before_the_change_is_dropped(patch: pytest.MonkeyPatch) -> None:
    note = Membership._note_present

    async def forgetful(self, m):
        if m.version <= self.epoch:
            await note(self, m)

    patch.setattr(Membership, "_note_present", forgetful)


@mutant(first=55)
def joiners_are_admitted_after_the_end(patch: pytest.MonkeyPatch) -> None:
    class Never(Roster):
        is_over = property(lambda self: False, lambda self, value: None)

    patch.setattr("shoal.engine.keeper.Roster", Never)
    patch.setattr(Mailbox, "has_left", lambda self, rank: False)


@mutant(first=176)
def a_joiner_asks_the_keeper_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.engine.edges.ASK_SECONDS", 1e9)


@mutant(first=19)
def a_lost_member_is_not_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "lose", lambda self, rank: None)


@mutant(first=1)
def a_joiner_forgets_its_state_when_the_keeper_calls_it_one(patch: pytest.MonkeyPatch) -> None:
    begin = Membership._begin_epoch

    def forgetful(self, epoch, members, joiners, let_in):
        begin(self, epoch, members, joiners, [[rank, epoch + 1] for rank, _ in joiners])

    patch.setattr(Membership, "_begin_epoch", forgetful)


@mutant(first=4)
def nobody_waits_for_what_joiners_answer(patch: pytest.MonkeyPatch) -> None:
    see = Membership._see_to_roll

    async def impatient(self):
        if not self.is_joining:
            self._roll |= {rank: STATELESS for rank in self.joiners if rank not in self._roll}
        await see(self)

    patch.setattr(Membership, "_see_to_roll", impatient)


@mutant(first=50)
def a_joiner_answers_the_roll_once(patch: pytest.MonkeyPatch) -> None:
    back = Membership._note_return

    async def once(self, m):
        if not self.is_joining or m.src == self._identity.keeper:
            await back(self, m)
        elif self._early_change is not None:
            await self._change(self._early_change)

    patch.setattr(Membership, "_note_return", once)


@mutant(first=867)
def a_process_answers_the_roll_for_one_before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_is_listed", property(lambda self: self._identity.rank in self._listed))


@mutant(first=1764)
def who_has_ended_and_left_is_waited_for_in_the_roll(patch: pytest.MonkeyPatch) -> None:
    answer, note = Membership._answer_roll, Membership._note_finished

    async def of_all(self):
        ended, self._ends.rounds = self._ends.rounds, {}
        await answer(self)
        self._ends.rounds = {**ended, **self._ends.rounds}

    async def not_in_the_roll(self, m):
        listed, self._listed = self._listed, {}
        try:
            await note(self, m)
        finally:
            self._listed = listed

    patch.setattr(Membership, "_answer_roll", of_all)
    patch.setattr(Membership, "_note_finished", not_in_the_roll)


@mutant(first=39)
def a_joiner_with_state_that_has_ended_has_not(patch: pytest.MonkeyPatch) -> None:
    let_in = Ends.let_in

    def forget(self, joiners):
        let_in(self, joiners)
        self.rounds = {rank: n for rank, n in self.rounds.items() if rank not in dict(joiners)}

    patch.setattr(Ends, "let_in", forget)


@mutant(first=5942)
def a_keeper_whose_last_member_comes_back_without_state_ends_the_run(patch: pytest.MonkeyPatch) -> None:
    admit = Roster.admit

    def rash(self, rank, incarnation):
        may = admit(self, rank, incarnation)
        if not self.members:
            self.joiners.clear()
        return may

    patch.setattr(Roster, "admit", rash)


# -- partitions --------------------------------------------------------------------------------------------


@mutant(first=0)
def a_minority_goes_on_alone(patch: pytest.MonkeyPatch) -> None:
    async def alone(self, lost):
        self.present = tuple(rank for rank in self.present if rank not in self._mailbox.gone)
        self._regroup()

    patch.setattr(Membership, "_await_change", alone)


@mutant(first=342)
def a_demoted_worker_keeps_its_old_model(patch: pytest.MonkeyPatch) -> None:
    take = Engine._take

    def keep(self, left):
        model = self.replica.x.clone()
        take(self, left)
        if self.samples:
            self.replica.x.copy_(model)

    patch.setattr(Engine, "_take", keep)


@mutant(first=354)
def a_keeper_that_is_cut_off_gives_everybody_up(patch: pytest.MonkeyPatch) -> None:
    hear = Keeper._hear

    async def rash(self, m):
        await hear(self, m)
        if m.tag == LOST:
            self.roster.lose(m.src)

    patch.setattr(Keeper, "_hear", rash)


@mutant(first=31)
def a_suspicion_of_an_older_epoch_counts(patch: pytest.MonkeyPatch) -> None:
    suspect = Roster.suspect
    patch.setattr(Roster, "suspect", lambda self, rank, other, epoch: suspect(self, rank, other, self.epoch))


@mutant(first=252)
def who_is_back_is_not_told_where_the_run_is(patch: pytest.MonkeyPatch) -> None:
    hear = Keeper._hear

    async def silent(self, m):
        if m.tag != "joined":
            await hear(self, m)

    patch.setattr(Keeper, "_hear", silent)


@mutant(first=19)
def what_a_keeper_that_was_away_did_not_hear_is_not_said_again(patch: pytest.MonkeyPatch) -> None:
    async def silent(self):
        pass

    patch.setattr(Reports, "repeat", silent)


@mutant(first=136)
def a_list_with_dead_workers_in_it_is_believed(patch: pytest.MonkeyPatch) -> None:
    async def believe(self):
        return

    patch.setattr(Membership, "_suspect_absent", believe)


@mutant(first=55)
def one_that_is_cut_off_to_the_end_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    async def wait(self, what, for_ever=False):
        await self._mailbox.attend_to(what, self.handlers, for_ever)

    patch.setattr(Membership, "wait", wait)


# -- slow disks --------------------------------------------------------------------------------------------


@mutant(first=587)
def the_keeper_tells_before_it_has_written(patch: pytest.MonkeyPatch) -> None:
    keep, tell = Keeper._keep, Keeper._tell

    async def too_early(self, ranks):
        await tell(self, ranks)
        keep(self)

    patch.setattr(Keeper, "_keep", lambda self: None)
    patch.setattr(Keeper, "_tell", too_early)


# -- open places -------------------------------------------------------------------------------------------


@mutant(first=210)
def places_that_nobody_has_are_dealt_to(patch: pytest.MonkeyPatch) -> None:
    made = Membership._made

    def too_many(self, average, total):
        outcome, me = made(self, average, total), self._identity
        open_places = range(len(me.first_workers), me.workers)
        return replace(outcome, dealt=tuple(sorted({*outcome.dealt, *open_places})))

    patch.setattr(Membership, "_made", too_many)


@mutant(first=84)
def the_keeper_takes_every_place_for_a_member(patch: pytest.MonkeyPatch) -> None:
    begin = Keeper.__init__

    def with_everybody(self, identity, *rest, **options):
        begin(self, identity, *rest, **options)
        self.roster.members = dict.fromkeys(range(identity.workers), 0)

    patch.setattr(Keeper, "__init__", with_everybody)


@mutant(first=63)
def one_that_joins_believes_in_the_first_members(patch: pytest.MonkeyPatch) -> None:
    enter = Membership.enter

    def forgetful(self, completed, outcome):
        first, me = self._identity.first_workers, self._identity.rank
        believed = outcome.dealt if me in first else tuple(sorted({*outcome.dealt, *first}))
        enter(self, completed, replace(outcome, dealt=believed))

    patch.setattr(Membership, "enter", forgetful)


OPEN_PLACES = [*MUTANTS][-3:]
"""Mutants that only runs with more places than workers at the start can catch."""


# -- too few ---------------------------------------------------------------------------------------------


@mutant(first=6107)
def one_that_was_cut_off_believes_in_its_epoch(patch: pytest.MonkeyPatch) -> None:
    change = Membership._change

    async def later_ones(self, m):
        if m.version > self.epoch:
            await change(self, m)

    patch.setattr(Membership, "_change", later_ones)


@mutant(first=6664)
def who_is_dropped_hears_of_it_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeper, "_let_know", Keeper._tell)


# -- goodbyes ----------------------------------------------------------------------------------------------


@mutant(first=355)
def who_says_goodbye_goes_before_the_others_know(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self):
        return True

    patch.setattr(Goodbye, "say", at_once)


@mutant(first=355)
def what_one_that_says_goodbye_has_not_handed_over_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    cross = Edges._deal_again

    def but_for_those(self, undone, was):
        return cross(self, {} if self._membership._ends.goodbyes else undone, was)

    patch.setattr(Edges, "_deal_again", but_for_those)
