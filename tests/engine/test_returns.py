"""A worker that was started again among peers: what it asks, gets and tells, and from where it goes on."""

import pytest
import torch

from parts import play, vector
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.protocol import Back, Known, Ready
from shoal.engine.returns import AHEAD, HAS_MODEL, HAS_NONE, TOO_LATE, Returns
from shoal.engine.state_transfer import messages
from shoal.engine.work import NONE_TAKEN, Work

SHARE = 10  # batches of each worker


class Averaging:
    under_way = ()


def returns_of(p):
    work = Work(p.me, p.channel, p.progress, p.replica, p.client, p.rounds, Averaging(), SHARE)
    return Returns(p.me, p.channel, p.progress, p.rounds, work), work


async def is_back(p, in_rounds):
    """Comes back; what it took, its step, the step after its last, its place, and when."""
    returns, work = returns_of(p)
    took = {}
    await returns.come_back(in_rounds, took.update)
    return took["x"].tolist(), p.progress.t, work.last_step, p.rounds.place, p.channel.now()


def scripted(standing, done=0, first=NONE_TAKEN, t=0, x=None, dies=False):
    """A peer that answers this; with `x` it gives that model, unless it dies before the last piece."""

    async def peer(p):
        asker = (await p.mailbox.find(Back().tag, None)).src
        known = torch.tensor([standing, done, first, t], dtype=torch.int64)
        await p.channel.send(asker, Known(parts=(known,)))
        if x is None:
            await p.channel.transport.sleep(20.0)
            p.mailbox.has_arrived()
            return [m.count for m in p.mailbox.poll(Back().tag)]
        await p.mailbox.find(Back().tag, asker)
        head, *pieces = messages({"x": x}, 0)
        for m in (head, *(pieces if not dies else ())):
            await p.channel.send(asker, m)
        if not dies:
            ready = await p.mailbox.find(Ready().tag, asker)
            return ready.seq
        p.channel.transport.vanish(0.5)
        return None

    return peer


@pytest.mark.parametrize("in_rounds", [True, False])
def test_it_goes_on_behind_what_anybody_knows_to_be_done(in_rounds):
    async def back(p):
        return await is_back(p, in_rounds)

    peers = scripted(HAS_MODEL, done=4, t=6, x=vector(7.0)), scripted(HAS_MODEL, done=5, t=5)
    said = play(back, *peers)
    step = 6 + AHEAD if in_rounds else 5
    assert said[0][:4] == ([7.0], step, step + SHARE - 5, 5)
    assert said[1] == (step if in_rounds else 0)


def test_it_leaves_to_others_what_they_have_taken_over():
    async def back(p):
        return await is_back(p, in_rounds=False)

    peers = scripted(HAS_MODEL, done=4, x=vector(7.0)), scripted(HAS_MODEL, done=3, first=8)
    _, step, last, place, _ = play(back, *peers)[0]
    assert (step, last, place) == (4, 8, 4)


def test_another_gives_the_model_if_the_first_dies_while_it_does():
    async def back(p):
        return await is_back(p, in_rounds=False)

    peers = scripted(HAS_MODEL, x=vector(7.0), dies=True), scripted(HAS_MODEL, done=2, x=vector(8.0))
    assert play(back, *peers)[0][:2] == ([8.0], 2)


def test_one_that_is_just_back_itself_gives_no_model():
    async def back(p):
        return await is_back(p, in_rounds=False)

    said = play(back, scripted(HAS_NONE), scripted(HAS_MODEL, x=vector(8.0)))
    assert said[0][0] == [8.0]
    assert said[1] == []  # it was not asked for one


@pytest.mark.parametrize("others", [(TOO_LATE, HAS_MODEL), (HAS_NONE, HAS_NONE)])
def test_it_is_over_where_the_others_have_ended_or_nobody_has_a_model(others):
    async def back(p):
        with pytest.raises(RunIsOver):
            await is_back(p, in_rounds=True)

    play(back, *map(scripted, others))


def test_those_who_are_there_answer_give_and_let_it_in():
    async def back(p):
        went_on = await is_back(p, in_rounds=True)
        await p.channel.transport.sleep(9.0)
        return went_on

    async def hosts(p):
        returns, _ = returns_of(p)
        returns.share = lambda: {"x": vector(7.0)}
        p.progress.note_place(0, 4)  # which it heard before the other died
        for _ in range(6):
            p.progress.count_gradient(1)
            p.progress.finish_step()
        await p.rounds.answer_until(lambda: p.channel.now() > 5.0)
        here = []
        for _ in range(AHEAD + 1):
            here.append(p.rounds.here([0]))
            p.progress.finish_step()
        return here

    said = play(back, hosts)
    assert said[0][:4] == ([7.0], 6 + AHEAD, 6 + AHEAD + SHARE - 4, 4)
    assert said[1] == [[]] * AHEAD + [[0]]


def test_one_that_has_parted_says_that_it_is_too_late():
    async def back(p):
        with pytest.raises(RunIsOver):
            await is_back(p, in_rounds=True)

    async def has_parted(p):
        returns_of(p)
        p.rounds.has_parted = True
        await p.rounds.answer_until(lambda: p.channel.now() > 3.0)

    play(back, has_parted)
