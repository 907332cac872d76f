"""Goodbye: a worker leaves when there is an epoch without it, or says that nobody lets it go."""

import torch

from parts import play
from shoal.engine.elastic_messages import Change, RunOver
from shoal.engine.goodbye import Goodbye
from shoal.engine.membership import Membership


def change(epoch, *members):
    pairs = torch.tensor([[rank, 0] for rank in members], dtype=torch.int64).reshape(-1)
    none = torch.empty(0, dtype=torch.int64)
    return Change(parts=(pairs, none, none), version=epoch)


async def leaves(p):
    members = Membership(p.me, p.channel, p.mailbox, p.group)
    let_go = await Goodbye(p.me, p.channel, p.mailbox, members).say()
    return let_go, members.is_joining, p.channel.now()


async def stays(p):
    """The epochs in which it is told of the goodbye."""
    await p.channel.transport.sleep(6.0)
    p.mailbox.has_arrived()
    return [m.version for m in p.mailbox.poll("leaves")]


def kept_by(*answers):
    """What the worker that leaves, one that stays and the keeper say; the keeper answers every second."""

    async def keeps(p):
        for m in answers:
            await p.channel.transport.sleep(1.0)
            await p.channel.tell(0, m)
        return await stays(p)

    said = play(leaves, stays, keeps, keeper=True)
    return said[0], said[1], said[2]


def test_it_leaves_when_an_epoch_begins_without_it():
    assert kept_by(change(1, 1)) == ((True, True, 1.25), [0], [0])


def test_it_says_so_again_in_an_epoch_that_still_lists_it():
    assert kept_by(change(1, 0, 1), change(2, 1)) == ((True, True, 2.25), [0, 1], [0, 1])


def test_where_too_few_would_be_left_it_must_vanish():
    assert kept_by(RunOver()) == ((False, True, 1.25), [0], [0])


def test_it_waits_for_no_keeper_that_has_ended():
    async def ends(p):
        return None

    said = play(leaves, stays, ends, keeper=True)
    assert said[0][:2] == (True, True)
    assert said[0][2] < 2.0  # the run is over for all
