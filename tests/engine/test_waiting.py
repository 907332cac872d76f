"""Whoever has done its work waits for the slowest, however long that takes; not for one that is silent."""

import pytest
import torch

from shoal.core.errors import PeerLost
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
