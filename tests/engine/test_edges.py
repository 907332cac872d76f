"""Edges of rounds: what was dealt to who is absent is dealt again, and joiners get the state."""

from types import SimpleNamespace

import pytest
import torch

from parts import nothing, play, vector
from shoal.core.errors import ShoalError
from shoal.engine.edges import Edges
from shoal.engine.elastic_messages import Change, RunOver
from shoal.engine.membership import Membership
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.round_outcome import RoundOutcome
from shoal.engine.state_transfer import messages


class Dealing:
    """A replica that notes how its data is dealt; a pass over it has 12 steps, shared out."""

    def __init__(self, x, place_in_data):
        self.x = x
        self.dealt = []
        self.place_in_data = place_in_data

    def redeal(self, place, workers, step, last):
        self.dealt.append((place, workers, step, dict(last.undone), last.was))

    def end_of(self, passes):
        return passes * 12 // self.dealt[-1][1]

    def deal(self):
        return None

    def take_deal(self, deal):
        raise AssertionError("nobody has dealt it anew")


class Joint:
    """A worker's membership and edges. `gives` is the `x` of its state."""

    def __init__(self, p, place_in_data="batch 3", gives=0.0):
        self.p = p
        self.replica = Dealing(p.replica.x, place_in_data)
        self.members = Membership(p.me, p.channel, p.mailbox, p.group)
        self.averages = SimpleNamespace(open=0, started=0)
        self.took = []
        of_run = self.members, p.progress, self.averages, self.replica, 1
        self.edges = Edges(
            p.me, p.channel, p.mailbox, *of_run, lambda: {"x": vector(gives)}, self.took.append
        )

    def steps(self, number):
        for _ in range(number):
            self.p.progress.count_gradient(64)
            self.p.progress.finish_step()

    def completes(self, contributors, dealt):
        """A round that came to this."""
        members = self.members
        members.completed += 1
        members.since_edge.append(contributors)
        members._outcomes = {members.completed: RoundOutcome(vector(1.0, 1.0), 64.0, contributors, dealt)}
        self.p.progress.take_unmerged()


def change(epoch, *members, joiners=(), let_in=1):
    lists = [[(rank, 0) for rank in ranks] for ranks in (members, joiners)]
    lists.append([(rank, let_in) for rank in joiners])
    parts = tuple(torch.tensor(pairs, dtype=torch.int64).reshape(-1) for pairs in lists)
    return Change(parts=parts, version=epoch)


async def told(p, tag):
    """What this node, the keeper, is told with that tag: sender and epoch."""
    await p.channel.transport.sleep(8.0)
    p.mailbox.has_arrived()
    return [(m.src, m.version) for m in p.mailbox.poll(tag)]


# -- at those who are there ------------------------------------------------------------------------


def test_an_edge_that_nobody_left_at_deals_nothing():
    async def works(p):
        at = Joint(p)
        before = await at.edges.cross()  # no round is complete
        at.steps(3)
        at.completes((0, 1), (0, 1))
        return before, await at.edges.cross(), at.replica.dealt, at.edges.block_began, at.members.since_edge

    assert play(works, nothing, nothing, keeper=True)[0] == (None, None, [], 3, [])


def test_the_block_of_who_did_not_contribute_is_dealt_to_those_who_are_there():
    async def survives(p):
        at = Joint(p)
        at.steps(4)
        at.completes((0, 1, 2), (0, 1, 2))
        await at.edges.cross()
        at.steps(3)
        at.completes((0, 2), (0, 2))  # worker 1 died in the second block
        end = await at.edges.cross()
        return end, at.replica.dealt, at.members.dealt

    said = play(survives, nothing, nothing, nothing, keeper=True)[0]
    assert said == (6, [(0, 2, 7, {1: range(4, 7)}, None)], (0, 2))


def test_what_it_has_done_since_the_round_stays_its_own():
    async def survives(p):
        at = Joint(p)
        at.steps(3)
        at.completes((0,), (0,))
        at.steps(1)  # computed while the average was formed
        await at.edges.cross()
        return at.replica.dealt

    assert play(survives, nothing, nothing, keeper=True)[0] == [(0, 1, 4, {1: range(0, 4)}, [0])]


def test_averages_that_are_under_way_are_passed_by_while_nobody_comes_or_goes():
    async def works(p):
        at, began = Joint(p), []
        for _ in range(3):
            at.steps(2)
            at.averages.started += 1
            at.averages.open = 1
            if at.averages.started > 1:  # the one before is complete
                at.completes((0, 1), (0, 1))
            await at.edges.cross()
            began.append(at.edges.blocks)
        return began, at.replica.dealt

    assert play(works, nothing, nothing, keeper=True)[0] == ([[0, 2], [2, 4], [4, 6]], [])


@pytest.mark.parametrize("theirs", ["batch 3", "batch 4"])
def test_who_is_elsewhere_in_the_data_cannot_deal_anew(theirs):
    async def crosses(p, place):
        at = Joint(p, place)
        at.steps(3)
        at.completes((0, 1), (0, 1))
        at.members.dealt = (0, 1, 2)
        await at.edges.cross()
        await p.channel.transport.sleep(1.0)
        await at.members.attend()

    async def first(p):
        if theirs == "batch 3":
            await crosses(p, "batch 3")
            return
        with pytest.raises(ShoalError, match="worker 1 is at batch 4, worker 0 at batch 3"):
            await crosses(p, "batch 3")

    async def second(p):
        await crosses(p, theirs)

    play(first, second, nothing, nothing, keeper=True)


# -- at a joiner -----------------------------------------------------------------------------------


async def gives(p):
    """Worker 0 has just completed a round whose edge lets worker 1 in."""
    at = Joint(p, gives=7.0)
    await p.channel.tell(0, change(1, 0, joiners=(1,)))
    await p.channel.transport.sleep(1.0)
    await at.members.attend()
    at.steps(3)
    at.members.dealt = (0,)
    at.completes((0,), (0, 1))
    await at.edges.cross()
    await p.channel.transport.sleep(5.0)
    return at.replica.dealt


def test_a_joiner_gets_the_state_of_one_who_has_just_completed_a_round():
    async def joins(p):
        at = Joint(p)
        at.members.is_joining = True
        end = await at.edges.enter()
        (state,) = at.took
        await p.channel.transport.sleep(5.0)  # the roll of the epoch needs its answer
        await at.members.attend()
        return end, state["x"].item(), at.members.completed, at.members.dealt, at.replica.dealt

    async def keeps(p):
        await p.channel.tell(1, change(1, 0, joiners=(1,)))
        return await told(p, "settled")

    said = play(gives, joins, keeps, keeper=True)
    assert said[0] == [(0, 2, 3, {}, None)]
    assert said[1] == (6, 7.0, 1, (0, 1), [(1, 2, 0, {}, None)])
    assert said[2] == [(1, 1)]


def test_a_state_that_comes_in_the_same_moment_as_the_next_list_is_not_lost():
    """Whoever gave it may be dead by then, and nobody else have one."""
    outcome = RoundOutcome(vector(1.0, 1.0), 64.0, (0,), (0, 1))
    state = {"x": vector(7.0), "completed": 1, "outcome": vars(outcome)}

    async def gives_and_dies(p):
        for m in messages(state, epoch=1):
            await p.channel.send(1, m)

    async def joins(p):
        at = Joint(p)
        at.members.is_joining = True
        await p.channel.transport.sleep(3.0)
        await at.edges.enter()
        return at.took[0]["x"].item(), at.members.is_joining, at.members.epoch, at.members.completed

    async def keeps(p):
        await p.channel.tell(1, change(1, 0, joiners=(1,)))
        await p.channel.transport.sleep(1.0)
        await p.channel.tell(1, change(2, joiners=(1,)))
        return await told(p, "settled")

    said = play(gives_and_dies, joins, keeps, keeper=True)
    assert said[1] == (7.0, False, 2, 1)
    assert said[2] == [(1, 1), (1, 2)]


def test_a_state_may_come_before_the_keepers_word_of_its_epoch():
    outcome = RoundOutcome(vector(1.0, 1.0), 64.0, (0,), (0, 1))
    state = {"x": vector(7.0), "completed": 1, "outcome": vars(outcome)}

    async def gives_early(p):
        for m in messages(state, epoch=1):
            await p.channel.send(1, m)
        await p.channel.transport.sleep(5.0)

    async def joins(p):
        at = Joint(p)
        at.members.is_joining = True
        await at.edges.enter()
        return at.took[0]["x"].item(), p.channel.now()

    async def keeps(p):
        await p.channel.transport.sleep(2.0)
        await p.channel.tell(1, change(1, 0, joiners=(1,)))
        await p.channel.transport.sleep(5.0)

    assert play(gives_early, joins, keeps, keeper=True)[1] == (7.0, 2.25)


def test_a_joiner_asks_again_until_the_run_is_over():
    async def joins(p):
        at = Joint(p)
        at.members.is_joining = True
        with pytest.raises(RunIsOver):
            await at.edges.enter()
        return p.channel.now()

    async def keeps(p):
        await p.channel.transport.sleep(2.0)
        await p.channel.tell(1, RunOver())
        return await told(p, "join")

    said = play(nothing, joins, keeps, keeper=True)
    assert said[1] == 2.25
    assert said[2] == [(1, 0)] * 3


def test_a_joiner_whose_keeper_has_ended_has_come_too_late():
    async def joins(p):
        at = Joint(p)
        at.members.is_joining = True
        with pytest.raises(RunIsOver):
            await at.edges.enter()
        return p.channel.now()

    assert play(nothing, joins, nothing, keeper=True)[1] < 2.0
