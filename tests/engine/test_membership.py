"""Members of an epoch: who is behind gets what it lacks, and what nobody has is formed again."""

from dataclasses import replace

import pytest
import torch

from parts import nothing, play, vector
from shoal.collectives import stripes
from shoal.core.transport import JOINED, Message
from shoal.engine.elastic_messages import STATELESS, Change, Finished, Present
from shoal.engine.membership import Membership
from shoal.engine.membership_errors import Demoted
from shoal.engine.protocol import Joined
from shoal.engine.round_outcome import RoundOutcome


def membership_of(p):
    return Membership(p.me, p.channel, p.mailbox, p.group)


def change(epoch, *members, joiners=(), let_in=None):
    """What a keeper would say of workers that were never restarted; joiners are let in by this epoch."""
    lists = [[(rank, 0) for rank in ranks] for ranks in (members, joiners)]
    lists.append([(rank, epoch if let_in is None else let_in) for rank in joiners])
    parts = tuple(torch.tensor(pairs, dtype=torch.int64).reshape(-1) for pairs in lists)
    return Change(parts=parts, version=epoch)


async def average(p, members, value):
    async def formation():
        return await stripes(p.group, vector(value, value), 1.0)

    return (await members.form(formation))[0][0].item()


def test_a_round_is_formed_by_those_who_are_present():
    async def work(p):
        members = membership_of(p)
        return await average(p, members, 4.0 * p.me.rank), members.completed, members.size

    assert play(work, work) == {0: (2.0, 1, 2), 1: (2.0, 1, 2)}


def test_a_round_that_nobody_has_is_formed_again_without_the_lost_one():
    async def survive(p):
        members = membership_of(p)
        if p.me.rank == 0:  # as a keeper would, once it has noticed
            await p.channel.tell(0, change(1, 0, 1))
            await p.channel.tell(1, change(1, 0, 1))
        return await average(p, members, 4.0 * p.me.rank), members.epoch, members.outcome.contributors

    async def die(p):  # in the middle of the average: one has its stripe
        await p.group.send(0, Message("stripe", (vector(100.0),), count=1.0))

    said = play(survive, survive, die)
    assert said[0] == said[1] == (2.0, 1, (0, 1))


def test_who_is_behind_gets_the_outcome_from_one_who_has_it():
    async def ahead(p):
        members = membership_of(p)

        async def known():
            return vector(7.0, 7.0), 3.0

        await members.form(known)  # it completed the round of three before the third died
        await p.channel.tell(0, change(1, 0, 1))
        await p.channel.tell(1, change(1, 0, 1))
        await p.channel.transport.sleep(3.0)
        await members.attend()
        await p.channel.transport.sleep(3.0)
        await members.attend()
        return members.completed

    async def behind(p):
        members = membership_of(p)
        value = await average(p, members, 1.0)
        return value, members.completed, members.outcome.contributors, members.size

    async def die(p):
        return

    assert play(ahead, behind, die) == {0: 1, 1: (7.0, 1, (0, 1, 2), 3), 2: None}


def test_nobody_leaves_before_all_have_finished():
    async def early(p):
        members = membership_of(p)
        await members.part()
        return p.channel.now()

    async def late(p):
        members = membership_of(p)
        await p.channel.transport.sleep(5.0)
        await members.part()

    async def keep(p):
        return [(await p.mailbox.next()).src for _ in range(2)]

    said = play(early, late, keep, keeper=True)
    assert said[0] >= 5.0
    assert said[2] == [0, 1]


def test_who_has_ended_and_joins_again_is_waited_for_though_word_of_its_end_comes_late():
    async def stays(p):
        members = membership_of(p)
        await p.channel.tell(0, change(1, 0, joiners=(1,)))  # as a keeper would that has forgotten worker 1
        await p.channel.transport.sleep(1.0)
        await members.attend()
        first = await average(p, members, 2.0)
        assert members.deal_to((0, 1)) == (1,)
        await p.channel.transport.sleep(4.0)
        return first, await average(p, members, 2.0)

    async def joins_again(p):
        members = membership_of(p)
        await p.channel.tell(1, change(1, 0, joiners=(1,)))
        await p.channel.transport.sleep(1.0)
        with pytest.raises(Demoted):
            await members.attend()
        members.enter(1, RoundOutcome(vector(2.0, 2.0), 1.0, (0,), (0, 1)))
        await p.channel.transport.sleep(2.0)
        await p.channel.tell(0, Finished(seq=1, version=0))
        return await average(p, members, 4.0)

    assert play(stays, joins_again) == {0: (2.0, 3.0), 1: 3.0}


async def enters(p, members, outcome):
    """As a joiner of epoch 1 with the state after round 1."""
    members.is_joining = True
    await p.channel.tell(p.me.rank, change(1, 0, joiners=(1,)))
    await p.channel.transport.sleep(1.0)
    await members.attend()
    members.enter(1, outcome)


@pytest.mark.parametrize("let_in", [1, 2])
def test_a_joiner_that_has_state_says_so_in_a_later_epoch_unless_it_was_let_in_anew(let_in):
    outcome = RoundOutcome(vector(2.0, 2.0), 1.0, (0,), (0, 1))

    async def stays(p):
        members = membership_of(p)
        members.completed, members.epoch = 1, 1
        await p.channel.transport.sleep(2.0)
        return await average(p, members, 2.0)

    async def joins(p):
        members = membership_of(p)
        await enters(p, members, outcome)
        await p.channel.transport.sleep(1.0)
        if let_in == 2:  # it was given up in between, and may have missed rounds
            with pytest.raises(Demoted):
                await average(p, members, 4.0)
            return members.is_joining
        return await average(p, members, 4.0)

    async def keep(p):
        await p.channel.transport.sleep(1.5)
        for rank in (0, 1):
            await p.channel.tell(rank, change(2, 0, joiners=(1,), let_in=let_in))
        await p.channel.transport.sleep(5.0)
        p.mailbox.has_arrived()
        return [(m.src, m.version) for m in p.mailbox.poll("settled")]

    said = play(stays, joins, keep, keeper=True)
    assert said == ({0: 3.0, 1: 3.0, 2: [(1, 2)]} if let_in == 1 else {0: 2.0, 1: True, 2: []})


def test_one_that_was_a_joiner_gives_the_others_the_outcome_of_the_round_that_its_state_is_of():
    outcome = RoundOutcome(vector(7.0, 7.0), 2.0, (0, 2), (0, 1))

    async def behind(p):
        members = membership_of(p)
        members.epoch = 1
        await p.channel.transport.sleep(2.0)
        return await average(p, members, 1.0), members.outcome.dealt, members.present

    async def joins(p):
        members = membership_of(p)
        await enters(p, members, outcome)
        for rank in (0, 1):
            await p.channel.tell(rank, change(2, 0, joiners=(1,), let_in=1))
        await p.channel.transport.sleep(2.0)
        await members.attend()
        await p.channel.transport.sleep(2.0)
        await members.attend()

    assert play(behind, joins, nothing, keeper=True)[0] == (7.0, (0, 1), (0, 1))


def test_a_list_that_a_keeper_repeats_disturbs_no_average():
    """One that was killed and is back may say again what all know; an all-reduce goes on."""

    async def work(p):
        members, disturbed = membership_of(p), []
        for _ in range(4):
            await p.channel.transport.sleep(1.0)
            disturbed.append(members._is_disturbed())
            await members.attend()
        return disturbed

    async def keep(p):
        await p.channel.transport.sleep(0.5)
        for epoch in (0, 1, 1, 2):
            await p.channel.tell(0, change(epoch, 0))
            await p.channel.transport.sleep(1.0)

    assert play(work, keep, keeper=True)[0] == [False, True, False, True]


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_process_answers_the_roll_for_itself_and_not_for_one_before_it(incarnation):
    """It hears of a list that may be older than itself, and then of a worker that was cut off."""

    async def hears(p):
        await p.channel.transport.sleep(2.0)
        p.mailbox.has_arrived()
        return [m.seq for m in p.mailbox.poll("present")]

    async def asks(p):
        p.me = replace(p.me, incarnation=incarnation)
        members = membership_of(p)
        members.is_joining = True
        await members.handlers["change"](change(1, 0, joiners=(1,)))  # with incarnation 0
        await members.handlers[JOINED](Joined(src=0))

    assert play(hears, asks, nothing, keeper=True)[0] == ([] if incarnation else [STATELESS] * 2)


def test_a_member_that_ended_before_it_heard_of_an_epoch_is_not_waited_for_in_its_roll():
    def of_two(p):
        members = membership_of(p)
        members.present = (0, 1)
        return members

    async def ends_and_leaves(p):
        await of_two(p).part()

    async def hears_of_a_joiner(p):
        members = of_two(p)
        await p.channel.tell(0, Finished(seq=0, version=0))
        await p.channel.transport.sleep(2.0)
        await members.handlers["change"](change(1, 0, 1, joiners=(2,)))
        await members.handlers["present"](Present(seq=STATELESS, version=1, src=2))
        await members.part()
        return p.channel.now()

    assert play(ends_and_leaves, hears_of_a_joiner, nothing, nothing, keeper=True)[1] < 4.0


def test_a_joiner_answers_a_list_with_one_in_it_whose_death_it_never_heard_of():
    async def hears(p):
        await p.channel.transport.sleep(2.0)
        p.mailbox.has_arrived()
        return [m.seq for m in p.mailbox.poll("present")]

    async def asks(p):
        members = membership_of(p)
        members.is_joining = True
        lists = (vector(0, 0, 2, 1), vector(1, 0), vector(1, 1))  # of worker 2 the second incarnation
        await members.handlers["change"](Change(parts=tuple(pairs.long() for pairs in lists), version=1))

    assert play(hears, asks, nothing, nothing, keeper=True)[0] == [STATELESS]


@pytest.mark.parametrize(
    ("answer", "incarnation", "may"), [(None, 0, True), (3, 0, True), (STATELESS, 0, False), (3, 1, False)]
)
def test_a_joiner_may_get_state_from_one_that_may_have_some_and_is_there(answer, incarnation, may):
    """Worker 0, a joiner by the list, too, has said that it has some, or none, or has been started again."""

    async def asks(p):
        members = membership_of(p)
        members.is_joining = True
        await members.handlers["change"](change(1, joiners=(0, 1)))
        if answer is not None:
            await members.handlers["present"](Present(seq=answer, version=1, src=0))
        p.mailbox.incarnations[0] = incarnation
        return members.may_get_state

    assert play(nothing, asks, nothing, keeper=True)[1] is may
