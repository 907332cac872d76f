"""Whoever has done its work waits for the slowest, however long that takes; not for one that is silent."""

import pytest
import torch

from parts import play
from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.sim import Compute, Simulation
from shoal.strategies import ASGD
from shoal.testing.problems import Slope

START = torch.zeros(1, dtype=torch.float64)


def impatient(**options) -> Simulation:
    """Two workers that give up after two seconds of silence; the second takes ten for each step."""
    simulation = Simulation(
        ASGD(),
        lambda rank: Slope().replica(rank, START),
        workers=2,
        steps=3,
        compute=Compute(1.0, slow={1: 10.0}),
        **options,
    )
    for node in simulation.nodes[:2]:
        node.channel.timeout = 2.0
    return simulation


def test_a_worker_that_is_done_waits_for_one_much_slower():
    run = impatient().run()
    assert run.server.x.item() == -6.0
    assert run.seconds == 30.0


def test_a_server_that_says_nothing_any_more_is_not_waited_for():
    simulation = impatient()
    server = simulation.nodes[2]
    served = server.service.messages

    async def falls_silent():
        async for m in served():
            yield m
            if server.version == 4:
                await server.transport.sleep(1000.0)

    server.service.messages = falls_silent
    with pytest.raises(PeerLost, match="worker 0 waited 2 s for the answer to 'more' from the server"):
        simulation.run()


def test_a_server_that_nobody_talks_to_waits_while_all_are_connected():
    slow = Compute(10.0)
    simulation = Simulation(
        ASGD(), lambda rank: Slope().replica(rank, START), workers=2, steps=3, compute=slow
    )
    simulation.nodes[2].channel.timeout = 2.0
    assert simulation.run().server.x.item() == -6.0


def test_a_peer_that_hangs_is_noticed_whatever_the_others_say():
    async def wait(p):
        p.channel.timeout = 2.0
        with pytest.raises(PeerLost, match="worker 0 waited 2 s for 'word' from worker 1"):
            await p.mailbox.find("word", 1)
        return p.channel.now()

    async def hang(p):
        await p.channel.transport.sleep(100.0)

    async def chat(p):
        for _ in range(100):
            await p.channel.send(0, Message("chat"))
            await p.channel.transport.sleep(0.5)

    assert play(wait, hang, chat)[0] == pytest.approx(2.0, abs=0.1)


def test_a_peer_that_talks_of_other_things_is_waited_for():
    async def wait(p):
        p.channel.timeout = 2.0
        return (await p.mailbox.find("word", 1)).src

    async def chat(p):
        for _ in range(10):
            await p.channel.send(0, Message("chat"))
            await p.channel.transport.sleep(1.0)
        await p.channel.send(0, Message("word"))

    assert play(wait, chat)[0] == 1
