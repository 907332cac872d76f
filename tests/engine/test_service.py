"""A service applies every push once, and tells its algorithm who still contributes."""

from dataclasses import replace

import torch

from parts import Parts, nothing, play, vector
from shoal.core.identity import SERVER
from shoal.engine.channel import Channel
from shoal.engine.pool import Pool
from shoal.engine.protocol import BatchesRead, Checkpointed, Fewer, Look, Pull, Push, Where
from shoal.engine.service import Keeping, Service


def service_of(p, steps=None, checkpoint=None):
    keeping = Keeping(state=dict, load=lambda state: None, checkpoint=checkpoint)
    pool = None if steps is None else Pool(p.me.workers, steps)
    parts = (p.me, p.channel, p.mailbox, p.coding, p.progress, p.replica, p.one_sided)
    return Service(*parts, keeping, pool)


async def serve(p):
    """Add up what is pushed; what the algorithm saw."""
    service, seen = service_of(p), []
    service.begin()
    async for m in service.messages():
        seen.append(type(m))
        if isinstance(m, Push):
            p.replica.x.add_(m.body)
            p.progress.advance(m.count)
        elif isinstance(m, Pull):
            await service.reply(m, p.replica.x)
    return seen, p.replica.x.tolist(), p.progress.merged, service.active


def test_a_push_that_comes_twice_is_applied_once():
    async def work(p):
        question = await p.mailbox.ask(1, Push(parts=(vector(1.0, 2.0),), count=4.0))
        await p.channel.send(1, p.mailbox.asked(question))  # as a network that repeats would
        await p.mailbox.answer(question)
        return (await p.client.pull(SERVER, torch.zeros(2, dtype=torch.float64))).tolist()

    said = play(work, serve, servers=1)
    assert said[0] == [1.0, 2.0]
    assert said[1] == ([Push, Pull, Fewer], [1.0, 2.0], 4.0, set())


def test_an_update_that_is_not_finite_is_refused():
    async def work(p):
        await (await p.client.start_push(SERVER, vector(1.0, float("nan")), 1.0, None))()
        return p.channel.meter.faults

    said = play(work, serve, servers=1)
    assert said[0] == ["an update of worker 0 at its step 0 was refused: element 1 is nan"]
    assert said[1][1] == [0.0, 0.0]


def test_a_batch_of_a_worker_that_left_goes_to_one_that_asks():
    async def work(p):
        return [await p.client.take_more() for _ in range(1)]

    async def serve_batches(p):
        service = service_of(p, steps=1)
        async for _ in service.messages():
            pass

    assert play(work, nothing, serve_batches, servers=1)[0] == [(1, 0, 1)]


def test_those_who_are_stopped_first_have_the_rest_of_their_shares_in_the_checkpoint():
    rest = []

    async def stop(p):
        await p.channel.tell(2, Checkpointed(seq=1))  # and leaves

    async def stop_later(p):
        await p.channel.transport.sleep(1.0)
        await p.channel.tell(2, Checkpointed(seq=1))

    async def serve_batches(p):
        async def checkpoint():
            rest.append(service.state()["pool"])

        service = service_of(p, steps=4, checkpoint=checkpoint)
        async for _ in service.messages():
            pass

    play(stop, stop_later, serve_batches, servers=1)
    pool = Pool(2, 4)
    pool.load(rest[0])
    assert pool.shares == [4, 4]
    assert len(rest) == 1


def test_one_that_is_back_hears_where_it_was_and_the_others_wait_until_it_is_done():
    async def work(p):
        assert await p.client.take_more() is None
        return p.channel.now()

    async def die_and_return(p):
        for clock in (1, 2):
            await p.channel.tell(2, BatchesRead(seq=3 * clock))
            p.progress.go_to(clock)
            await (await p.client.start_push(SERVER, vector(1.0, 1.0), 4.0, None))()
        await p.channel.tell(2, BatchesRead(seq=9))  # and dies before it pushes
        successor = replace(p.me, incarnation=1)
        again = Parts(successor, Channel(p.channel.transport, successor), p.replica)
        said = [
            (await again.mailbox.answer(await again.mailbox.ask(2, asked))).body.tolist()
            for asked in (Where(), Look(count=1.0), Look())
        ]
        await p.channel.transport.sleep(50.0)
        assert await again.client.take_more() is None
        return said

    async def serve_loops(p):
        service = service_of(p, steps=0)
        service.beside = [vector(7.0)]
        async for m in service.messages():
            if isinstance(m, Push):
                p.replica.x.add_(m.body)

    said = play(work, die_and_return, serve_loops, servers=1)
    assert said[1] == [[2, 6, 1], [7.0], [2.0, 2.0]]
    assert said[0] > 50.0
