"""An engine builds its parts, and saves and loads what is in them."""

import pytest
import torch

from shoal.core.codec import Identity
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.testing.problems import Slope
from shoal.transports.alone import Alone


async def no_mean(group, v, weight):
    raise AssertionError("one worker averages with nobody")


def engine_of(rank=0, workers=1, servers=0, lr=1.0, **options):
    me = NodeIdentity(rank, workers, servers)
    start = torch.zeros(2, dtype=torch.float64)
    replica = Parameters(start) if me.is_server else Slope(lr=lr, momentum=0.5).replica(rank, start)
    return Engine(Alone(), replica, me, mean=no_mean, codec=Identity(), **options)


def trained(engine, steps):
    """So many steps of the engine's own work; the model after each."""

    async def body():
        models = []
        while len(models) < steps and await engine.work.next():
            engine.replica.descend(await engine.gradients.next())
            engine.work.finish_step()
            models.append(engine.x[0].item())
        return models

    return drive(body())


def test_it_counts_what_its_parts_do():
    engine = engine_of(steps=5)
    assert trained(engine, 2) == [-1.0, -2.5]
    assert (engine.t, engine.samples, engine.merged, engine.is_server) == (2, 2, 0.0, False)


def test_one_that_loads_the_state_of_another_goes_on_as_that_one_would():
    engine, successor = engine_of(steps=5), engine_of(steps=5)
    trained(engine, 2)
    engine.variables.keep("velocity", torch.ones(2))
    torch.rand(3, generator=engine.rng)
    successor.load(engine.state())
    assert (successor.t, successor.samples) == (2, 2)
    assert successor.variables.keep("velocity", torch.zeros(2)).tolist() == [1.0, 1.0]
    assert torch.equal(torch.rand(3, generator=successor.rng), torch.rand(3, generator=engine.rng))
    assert trained(successor, 9) == trained(engine, 9) == [-4.25, -6.125, -8.0625]


def test_the_number_of_passes_is_that_of_steps_where_data_is_counted_in_steps():
    assert engine_of(steps=7).passes == 7
    assert engine_of(steps=7, passes=2).passes == 2


@pytest.mark.parametrize(("rank", "name", "serves"), [(0, "worker 0", False), (1, "the server", True)])
def test_workers_and_servers_have_the_same_parts(rank, name, serves):
    engine = engine_of(rank, workers=1, servers=1)
    assert (engine.name, engine.is_server, engine.membership) == (name, serves, None)
    assert engine.state().keys() == engine_of().state().keys()
