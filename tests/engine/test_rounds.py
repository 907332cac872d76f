"""Rounds among workers: never mixed up, ended together, and the mean at the end."""

import pytest
import torch
from test_node import play

from shoal.core.transport import Message
from shoal.engine.rounds import OVER
from shoal.sim import Compute, Faults, Network


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_round_is_told_by_its_number_and_not_by_its_arrival():
    async def listen(w):
        second = await w.take(2, 1)
        first = await w.take(1, 1)
        return second.body.item(), first.body.item()

    async def speak(w):
        for t in (1, 2):
            await w.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == (2.0, 1.0)


def test_who_is_ahead_has_passed_the_rounds_it_sent_nothing_for():
    async def listen(w):
        return await w.take(3, 1), (await w.take(7, 1)).body.item()

    async def speak(w):
        await w.give(7, [0], vector(7.0))

    assert play(listen, speak)[0] == (None, 7.0)


def test_a_late_message_of_an_earlier_round_is_not_taken_for_this_one():
    async def listen(w):
        return (await w.take(5, 1)).body.item()

    async def speak(w):
        for t in (3, 4, 5):
            await w.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == 5.0


def test_what_came_for_rounds_that_are_over_is_taken_late_and_once():
    async def listen(w):
        await w.take(5, 1)
        return [[m.seq for m in w.take_late(t)] for t in (5, 5)], (await w.take(6, 1)).seq

    async def speak(w):
        for t in (3, 4, 6, 5):
            await w.give(t, [0], vector(float(t)))

    assert play(listen, speak)[0] == ([[3, 4], []], 6)


@pytest.mark.parametrize("takes_late", [False, True])
def test_what_nobody_took_in_a_round_that_is_over_is_dropped_unless_it_is_taken_late(takes_late):
    async def listen(w):
        kept = []
        async for _ in w.rounds(takes_late=takes_late):
            await w.grad()
            w.here([1])
            kept.append(len(w.engine.rounds._held))
        return kept

    async def speak(w):
        async for t in w.rounds():
            await w.grad()
            await w.give(t, [0], vector(float(t)))

    said = play(listen, speak, steps=6, compute=Compute(1.0, slow={0: 1.5}))[0]
    assert (max(said) <= 3, said[-1] >= 5) == (not takes_late, takes_late)


def test_who_has_died_and_who_is_done_are_told_apart():
    async def listen(w):
        await w.engine.transport.sleep(5.0)
        return w.deaths, w.done, w.here(range(4))

    async def dies(w):
        await w.send(0, Message("hello"))
        await w.engine.transport.sleep(9.0)

    async def is_done(w):
        await w.give(OVER, [0])
        await w.engine.transport.sleep(9.0)

    async def stays(w):
        await w.engine.transport.sleep(9.0)

    faults = Faults(noticed_after=0.1).kill(1, 1.0)
    assert play(listen, dies, is_done, stays, faults=faults)[0] == (1, [2], [0, 3])


def test_who_has_gone_or_is_done_takes_no_part():
    async def listen(w):
        before = w.here([1, 2, 3])
        await w.engine.transport.sleep(2.0)
        return before, w.here([1, 2, 3]), await w.take(0, 1), await w.take(0, 2)

    async def leaves(w):
        await w.send(0, Message("hello"))

    async def is_done(w):
        await w.give(OVER, [0])
        await w.engine.transport.sleep(9.0)

    async def stays(w):
        await w.engine.transport.sleep(9.0)

    assert play(listen, leaves, is_done, stays)[0] == ([1, 2, 3], [3], None, None)


def test_arrived_never_waits():
    async def listen(w):
        early = await w.take(4, 1, wait=False)
        await w.engine.transport.sleep(1.0)
        return (
            early,
            (await w.take(4, 1, wait=False)).body.item(),
            (await w.take(4, 1, wait=False)),
            w.engine.channel.now(),
        )

    async def speak(w):
        await w.give(4, [0], vector(2.0))

    assert play(listen, speak)[0] == (None, 2.0, None, 1.0)


def test_parting_waits_for_all_and_gives_what_nobody_took():
    async def first(w):
        left = await w.part()
        return [(m.src, m.seq, m.count) for m in left], w.engine.channel.now()

    async def second(w):
        await w.engine.transport.sleep(3.0)
        await w.give(8, [0], vector(1.0), count=2.0)
        await w.give(9, [0], vector(1.0), count=3.0)
        await w.part()

    assert play(first, second)[0] == ([(1, 8, 2.0), (1, 9, 3.0)], 3.0)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 13])
def test_the_mean_of_all_is_the_same_for_all_and_exact(workers):
    async def meet(w):
        x = vector(float(w.rank * w.rank), 8.0 * w.rank)
        return (await w.average(x)).tolist(), w.engine.meter.bytes_sent

    done = play(*[meet] * workers, start=(0.0, 0.0), codec=None)
    mean = [sum(k * k for k in range(workers)) / workers, 8 * (workers - 1) / 2]
    assert [said[0] for said in done.values()] == [mean] * workers
    assert max(said[1] for said in done.values()) <= 3 * (104 + 2 * 8 + 2 * 8)


def test_half_precision_is_summed_in_more():
    async def meet(w):
        x = torch.full(
            (1,), 256.0 if w.rank == 0 else 1.0, dtype=torch.bfloat16
        )  # 256 + 1 is 256 in bfloat16
        mean = await w.average(x)
        return mean.dtype, mean.item()

    assert set(play(*[meet] * 3).values()) == {(torch.bfloat16, 86.0)}


def test_the_tree_takes_as_many_trips_as_it_has_levels():
    async def meet(w):
        await w.average(vector(1.0))
        return w.engine.channel.now()

    assert max(play(*[meet] * 7, network=Network(latency=1.0)).values()) == 2 * 2.0


@pytest.mark.parametrize("victim", range(7))
def test_whoever_dies_while_the_mean_is_formed_hangs_nobody(victim):
    async def meet(w):
        await w.part()
        if w.rank == victim:
            await w.engine.transport.sleep(100.0)
        x = vector(float(w.rank))
        return (await w.average(x)).item() == w.rank, [*w.engine.meter.faults]

    faults = Faults(noticed_after=0.5).kill(victim, 5.0)
    done = play(*[meet] * 7, faults=faults, network=Network(latency=0.25))
    assert done.keys() == set(range(7)) - {victim}
    assert all(keeps_its_own and faults for keeps_its_own, faults in done.values())


def test_a_peer_is_drawn_among_those_who_have_not_gone():
    async def draws(w):
        await w.recv("hello", src=1)
        await w.engine.transport.sleep(1.0)
        return {w.draw([1, 2, 3]) for _ in range(60)}, w.draw([1])

    async def leaves(w):
        await w.send(0, Message("hello"))

    async def stays(w):
        await w.engine.transport.sleep(2.0)

    assert play(draws, leaves, stays, stays)[0] == ({2, 3}, None)


def test_samples_count_as_merged_after_each_round():
    async def work(w):
        counts = []
        async for _ in w.rounds():
            await w.grad()
            counts.append(w.engine.merged)
        return counts, w.engine.merged

    assert play(work, work, steps=3, compute=Compute(1.0))[0] == ([0.0, 2.0, 4.0], 6.0)
