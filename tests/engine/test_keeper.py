"""The keeper decides who is a member, and its successor knows what it decided."""

import pytest

from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import Finished, Join, RunOver, Settled, Suspects
from shoal.engine.keeper import Keeper, Roster
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.launch.drive import drive
from shoal.sim import Disk


def test_a_lost_member_and_a_joiner_each_begin_an_epoch():
    roster = Roster(range(3))
    roster.lose(1)
    assert roster.is_due
    roster.begin_epoch()
    assert roster.admit(1, 1)
    roster.begin_epoch()
    assert (roster.epoch, roster.members, roster.joiners) == (2, {0: 0, 2: 0}, {1: 1})


def test_a_joiner_is_a_member_once_it_has_the_state_of_an_epoch_that_lists_it():
    roster = Roster(range(2))
    roster.admit(1, 1)
    roster.begin_epoch()
    roster.settle(1, 1, epoch=0)
    assert roster.joiners == {1: 1}
    roster.begin_epoch()
    roster.settle(1, 1, epoch=1)
    assert roster.members == {0: 0, 1: 1}
    assert not roster.is_due


def test_a_joiner_is_listed_with_the_epoch_that_let_it_in_last_also_by_a_successor():
    roster, successor = Roster(range(2)), Roster(range(2))
    roster.admit(1, 1)
    roster.begin_epoch()
    roster.begin_epoch()
    assert roster.lists == ([(0, 0)], [(1, 1)], [(1, 1)])
    roster.lose(1)
    roster.begin_epoch()
    roster.admit(1, 1)
    successor.load(roster.state())
    assert successor.lists == ([(0, 0)], [(1, 1)], [(1, 4)])


def test_a_joiner_that_leaves_begins_an_epoch_without_it_for_whose_answer_the_members_wait():
    roster = Roster(range(2))
    roster.admit(1, 1)
    roster.begin_epoch()
    roster.leave(1)
    assert roster.is_due
    assert roster.lists == ([(0, 0)], [], [])


def test_who_asks_again_changes_nothing():
    roster = Roster(range(2))
    roster.admit(1, 1)
    roster.begin_epoch()
    assert roster.admit(1, 1)
    assert not roster.is_due


def test_nobody_joins_a_run_that_is_over_or_has_no_members():
    roster = Roster(range(2))
    roster.leave(0)
    assert not roster.admit(0, 1)
    empty = Roster(range(1))
    empty.lose(0)
    assert not empty.admit(0, 1)


def test_a_joiner_that_may_have_state_is_joined_by_others():
    roster = Roster(range(2))
    roster.lose(1)
    assert roster.admit(1, 1)
    assert roster.admit(0, 1)
    assert roster.joiners == {0: 1, 1: 1} and not roster.members


def test_below_the_least_number_it_waits():
    roster = Roster(range(3), least=2)
    roster.lose(1)
    roster.lose(2)
    assert not roster.is_due
    roster.admit(1, 1)
    assert roster.is_due


def test_below_the_least_number_a_run_that_is_over_ends_without_the_others():
    roster = Roster(range(3), least=3)
    roster.is_over = True
    roster.lose(1)
    assert roster.is_due


class Script:
    """A transport that plays what a keeper hears, and keeps what it says."""

    def __init__(self, *heard):
        self.heard, self.said = list(heard), []

    def now(self):
        return 0.0

    async def send(self, dst, m):
        self.said.append((dst, m.tag, m.version, [part.tolist() for part in m.parts]))

    async def recv(self, timeout=None):
        return self.heard.pop(0)

    def drain(self):
        return iter(())


def keep(script, log=None, incarnation=0, workers=2, recovery=0.0, **settings):
    me = NodeIdentity(workers, workers, incarnation=incarnation, elastic=True)
    channel = Channel(script, me)
    mailbox = Mailbox(channel, me, Progress(workers), recovery=recovery)
    keeper = Keeper(me, channel, mailbox, log, **settings)
    drive(keeper.live())
    return keeper


def goodbye(*ranks):
    return [Message("left", src=rank) for rank in ranks]


def test_it_tells_members_and_joiners_of_every_change():
    join, settled = Join(src=1, incarnation=1), Settled(src=1, incarnation=1, version=2)
    script = Script(Suspects(src=0, seq=1), join, settled, *goodbye(0, 1))
    keep(script)
    assert script.said == [
        (0, "change", 1, [[0, 0], [], []]),
        (1, "change", 1, [[0, 0], [], []]),  # in case it lives, and does not know that it was given up
        (0, "change", 2, [[0, 0], [1, 1], [1, 2]]),
        (1, "change", 2, [[0, 0], [1, 1], [1, 2]]),
    ]


def test_it_believes_a_suspicion_of_this_epoch_only():
    old, new = Suspects(src=0, seq=1, version=3), Suspects(src=0, seq=1, version=0)
    script = Script(old, new, *goodbye(0))
    assert keep(script).roster.epoch == 1


def test_its_successor_goes_on_from_its_journal_and_tells_again():
    disk = Disk()
    keep(Script(Suspects(src=0, seq=1), *goodbye(0)), disk)
    again = Script(*goodbye(0))
    keeper = keep(again, disk, incarnation=1)
    assert keeper.roster.epoch == 1
    assert again.said == [(rank, "change", 1, [[0, 0], [], []]) for rank in (0, 1)]


def test_of_two_that_suspect_each_other_the_first_goes_on():
    roster = Roster(range(2))
    roster.suspect(0, suspected=1, epoch=0)
    roster.suspect(1, suspected=0, epoch=0)
    assert roster.members == {0: 0}


def test_a_loss_that_no_member_sees_changes_nothing_and_who_is_back_is_told_where_the_run_is():
    script = Script(Message("lost", src=1), Message("joined", src=1), *goodbye(0, 1))
    assert keep(script).roster.epoch == 0
    assert script.said == [(1, "change", 0, [[0, 0, 1, 0], [], []])]


def test_it_ends_when_all_members_are_lost_and_nobody_may_come_back():
    script = Script(Message("lost", src=1), Message("lost", src=0))
    assert keep(script).roster.members == {0: 0, 1: 0}


def joined_by_one(*heard):
    """Worker 1 joins, then worker 0 is lost, the only member."""
    return Script(Suspects(src=0, seq=1), Join(src=1, incarnation=1), Message("lost", src=0), *heard)


def test_when_all_members_are_lost_it_waits_for_a_joiner_that_may_have_its_state():
    settled, suspects = Settled(src=1, incarnation=1, version=2), Suspects(src=1, seq=0, version=2)
    keeper = keep(joined_by_one(settled, suspects, Message("left", src=1, incarnation=1)))
    assert (keeper.roster.epoch, keeper.roster.members) == (3, {})


@pytest.mark.parametrize(("epoch", "may_get_some"), [(1, False), (2, True)])
def test_it_waits_for_a_joiner_that_asked_again_while_it_may_have_been_getting_its_state(epoch, may_get_some):
    """In the epoch before it was not listed; in this one it saw a member that lived."""
    asks = Join(src=1, incarnation=1, version=epoch, seq=int(may_get_some))
    settled, suspects = Settled(src=1, incarnation=1, version=2), Suspects(src=1, seq=0, version=2)
    keeper = keep(joined_by_one(asks, settled, suspects, Message("left", src=1, incarnation=1)))
    assert (keeper.roster.epoch, keeper.roster.members) == (3, {})


def test_when_the_last_member_comes_back_without_state_it_goes_on_from_a_joiner_that_has_some():
    back, settled = Join(src=0, incarnation=1), Settled(src=1, incarnation=1, version=2)
    keeper = keep(joined_by_one(back, settled, *goodbye(0), Message("left", src=1, incarnation=1)))
    assert (keeper.roster.epoch, keeper.roster.members, keeper.roster.is_over) == (4, {}, True)


def test_it_waits_for_a_joiner_that_is_cut_off_as_long_as_it_may_come_back():
    """Worker 1 may have state; 0, the last member, comes back without."""
    cut_off, back = Message("lost", src=1), Message("joined", src=1, incarnation=1)
    settled = Settled(src=1, incarnation=1, version=2)
    heard = (cut_off, Join(src=0, incarnation=1), back, settled, *goodbye(0, 1))
    keeper = keep(joined_by_one(*heard), recovery=60.0)
    assert keeper.roster.is_over and not keeper.roster.members


def test_it_ends_when_all_members_are_lost_and_no_joiner_has_state():
    asks_again = joined_by_one(Join(src=1, incarnation=1, version=2))
    keep(asks_again)
    assert asks_again.said[-1] == (1, RunOver().tag, 0, [])
    dies = joined_by_one(Message("lost", src=1))
    assert keep(dies).roster.members == {0: 0}


def test_its_successor_begins_an_epoch_if_messages_between_workers_were_lost_with_it():
    disk = Disk()
    keep(Script(Suspects(src=0, seq=1), *goodbye(0)), disk)
    again = Script(*goodbye(0))
    keep(again, disk, incarnation=1, relays=True)
    assert again.said == [(rank, "change", 2, [[0, 0], [], []]) for rank in (0, 1)]


def test_below_the_least_number_it_says_that_training_waits():
    said = []
    script = Script(Suspects(src=0, seq=1), Join(src=1, incarnation=1), *goodbye(0, 1))
    keep(script, least=2, on_wait=said.append)
    assert said == ["training waits: it needs 2 workers, and 1 are there"]
    assert script.said[:2] == [
        (1, "change", 0, [[0, 0], [], []]),  # who is dead does not hear it
        (0, "change", 1, [[0, 0], [1, 1], [1, 1]]),
    ]


def test_below_the_least_number_one_that_was_cut_off_is_told_and_counts_when_it_asks():
    script = Script(Suspects(src=0, seq=1), Suspects(src=1, seq=0), Join(src=1, seq=1), *goodbye(0, 1))
    keep(script, least=2)
    assert script.said[:3] == [
        (1, "change", 0, [[0, 0], [], []]),
        (0, "change", 1, [[0, 0], [1, 0], [1, 1]]),
        (1, "change", 1, [[0, 0], [1, 0], [1, 1]]),
    ]


def test_one_that_gets_its_state_after_it_was_dropped_is_told():
    script = Script(Suspects(src=0, seq=1), Settled(src=1), *goodbye(0, 1))
    keep(script, least=2)
    assert script.said[:2] == [(1, "change", 0, [[0, 0], [], []])] * 2


def test_who_comes_when_the_run_is_over_is_told():
    script = Script(Finished(src=0), Join(src=1, incarnation=1), *goodbye(0, 1))
    keep(script)
    assert script.said == [(1, RunOver().tag, 0, [])]
