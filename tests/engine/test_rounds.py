"""Rounds among workers: never mixed up, ended together, and the mean at the end."""

import pytest
import torch

from parts import play, vector
from shoal.core.transport import Message
from shoal.engine.rounds import OVER


def test_a_round_is_told_by_its_number_and_not_by_its_arrival():
    async def listen(p):
        second = await p.rounds.take(2, 1)
        first = await p.rounds.take(1, 1)
        return second.body.item(), first.body.item()

    async def speak(p):
        for t in (1, 2):
            await p.rounds.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == (2.0, 1.0)


def test_who_is_ahead_has_passed_the_rounds_it_sent_nothing_for():
    async def listen(p):
        return await p.rounds.take(3, 1), (await p.rounds.take(7, 1)).body.item()

    async def speak(p):
        await p.rounds.give(7, [0], vector(7.0))

    assert play(listen, speak)[0] == (None, 7.0)


def test_a_late_message_of_an_earlier_round_is_not_taken_for_this_one():
    async def listen(p):
        return (await p.rounds.take(5, 1)).body.item()

    async def speak(p):
        for t in (3, 4, 5):
            await p.rounds.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == 5.0


def test_what_came_for_rounds_that_are_over_is_taken_late_and_once():
    async def listen(p):
        await p.rounds.take(5, 1)
        return [[m.seq for m in p.rounds.take_late(t)] for t in (5, 5)], (await p.rounds.take(6, 1)).seq

    async def speak(p):
        for t in (3, 4, 6, 5):
            await p.rounds.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == ([[3, 4], []], 6)


def test_who_has_died_and_who_is_done_are_told_apart():
    async def listen(p):
        await p.channel.transport.sleep(5.0)
        return p.rounds.deaths, p.rounds.done, p.rounds.here(range(4))

    async def dies(p):
        await p.channel.send(0, Message("hello"))
        await p.channel.transport.sleep(1.0)
        p.channel.transport.vanish(noticed_after=0.1)

    async def is_done(p):
        await p.rounds.give(OVER, [0])
        await p.channel.transport.sleep(9.0)

    async def stays(p):
        await p.channel.transport.sleep(9.0)

    assert play(listen, dies, is_done, stays)[0] == (1, [2], [0, 3])


def test_who_has_gone_or_is_done_takes_no_part():
    async def listen(p):
        before = p.rounds.here([1, 2, 3])
        await p.channel.transport.sleep(2.0)
        return before, p.rounds.here([1, 2, 3]), await p.rounds.take(0, 1), await p.rounds.take(0, 2)

    async def leaves(p):
        await p.channel.send(0, Message("hello"))

    async def is_done(p):
        await p.rounds.give(OVER, [0])
        await p.channel.transport.sleep(9.0)

    async def stays(p):
        await p.channel.transport.sleep(9.0)

    assert play(listen, leaves, is_done, stays)[0] == ([1, 2, 3], [3], None, None)


def test_arrived_never_waits():
    async def listen(p):
        early = await p.rounds.take(4, 1, wait=False)
        await p.channel.transport.sleep(1.0)
        return (
            early,
            (await p.rounds.take(4, 1, wait=False)).body.item(),
            (await p.rounds.take(4, 1, wait=False)),
            p.channel.now(),
        )

    async def speak(p):
        await p.rounds.give(4, [0], vector(2.0))

    assert play(listen, speak)[0] == (None, 2.0, None, 1.0)


def test_parting_waits_for_all_and_gives_what_nobody_took():
    async def first(p):
        left = await p.rounds.part({})
        return [(m.src, m.seq, m.count) for m in left], p.channel.now()

    async def second(p):
        await p.channel.transport.sleep(3.0)
        await p.rounds.give(8, [0], vector(1.0), count=2.0)
        await p.rounds.give(9, [0], vector(1.0), count=3.0)
        await p.rounds.part({})

    assert play(first, second)[0] == ([(1, 8, 2.0), (1, 9, 3.0)], 3.25)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 13])
def test_the_mean_of_all_is_the_same_for_all_and_exact(workers):
    async def meet(p):
        x = vector(float(p.me.rank * p.me.rank), 8.0 * p.me.rank)
        return (await p.rounds.average(x)).tolist(), p.channel.meter.bytes_sent

    done = play(*[meet] * workers)
    mean = [sum(k * k for k in range(workers)) / workers, 8 * (workers - 1) / 2]
    assert [said[0] for said in done.values()] == [mean] * workers
    assert max(said[1] for said in done.values()) <= 3 * (104 + 2 * 8 + 2 * 8)


def test_half_precision_is_summed_in_more():
    async def meet(p):
        x = vector(1.0 if p.me.rank else 256.0).bfloat16()  # where 256 + 1 is 256
        mean = await p.rounds.average(x)
        return mean.dtype, mean.item()

    assert set(play(*[meet] * 3).values()) == {(torch.bfloat16, 86.0)}


def test_the_tree_takes_as_many_trips_as_it_has_levels():
    async def meet(p):
        await p.rounds.average(vector(1.0))
        return p.channel.now()

    assert max(play(*[meet] * 7, latency=1.0).values()) == 2 * 2.0


@pytest.mark.parametrize("victim", range(7))
def test_whoever_dies_while_the_mean_is_formed_hangs_nobody(victim):
    async def meet(p):
        await p.rounds.part({})
        if p.me.rank == victim:
            await p.channel.transport.sleep(5.0)
            p.channel.transport.vanish(noticed_after=0.5)
            return None
        x = vector(float(p.me.rank))
        return (await p.rounds.average(x)).item() == p.me.rank, [*p.channel.meter.faults]

    done = play(*[meet] * 7)
    assert done.pop(victim) is None
    assert len(done) == 6
    assert all(keeps_its_own and faults for keeps_its_own, faults in done.values())


def test_a_peer_is_drawn_among_those_who_have_not_gone():
    async def draws(p):
        await p.mailbox.find("hello", 1)
        await p.channel.transport.sleep(1.0)
        return {p.rounds.draw([1, 2, 3]) for _ in range(60)}, p.rounds.draw([1])

    async def leaves(p):
        await p.channel.send(0, Message("hello"))

    async def stays(p):
        await p.channel.transport.sleep(2.0)

    assert play(draws, leaves, stays, stays)[0] == ({2, 3}, None)
