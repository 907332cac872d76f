"""Averages in mapped memory, in virtual time: bits as those by messages, time by what is touched."""

from copy import copy

import pytest
import torch

from shoal import BMUF, Faults, Local, Network
from shoal.collectives import InFlight, Mapped, stripes
from shoal.collectives.mapped import SMALLEST_MAPPED
from shoal.core.errors import PeerLost
from shoal.sim.hardware import Handling, Machine, Profile, Wiring
from shoal.testing.problems import Quadratic, simulate

PROBLEM = Quadratic(lr=0.1, targets=(1.0, -1.0, 0.5))
ELEMENTS = SMALLEST_MAPPED // 8
TOUCHED = Handling(byte=1e-9)


def run(mean, machine, strategy=None, workers=4, steps=4, elements=ELEMENTS, **options):
    strategy = strategy or Local(period=2)
    start = [0.0] * elements
    return simulate(
        strategy, PROBLEM, workers=workers, steps=steps, start=start, machine=machine, mean=mean, **options
    )


def messages(done):
    return sum(node.meter.messages_sent for node in done.nodes)


def sharing(**costs):
    return Machine(cores=4, per_host=4, maps_memory=True, **costs)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_bits_are_those_of_stripes_with_fewer_messages(workers):
    by_messages = run(stripes, sharing(), BMUF(period=2), workers=workers)
    mapped = run(Mapped(), sharing(), BMUF(period=2), workers=workers)
    for one, other in zip(by_messages.nodes, mapped.nodes, strict=True):
        assert torch.equal(one.replica.x, other.replica.x)
    assert workers < 4 or messages(mapped) < messages(by_messages)


class Averages(Local):
    """Averages a vector so many times, and does nothing else."""

    times = 1

    async def live(self, w):
        for _ in range(self.times):
            await w.mean(w.x)


class AveragesAgain(Averages):
    times = 3


def test_an_average_costs_what_it_touches():
    """In n bytes: 3 to copy the vector, 1 to zero the stripe, 2 x 1.5 to add, 1 to divide, 2 to join."""
    machine = sharing(vectors=TOUCHED)
    once, thrice = (run(Mapped(), machine, s, workers=2).seconds for s in (Averages(), AveragesAgain()))
    assert thrice - once == pytest.approx(2 * (3 + 1 + 3 + 1 + 2) * 8 * ELEMENTS * 1e-9, rel=0.01)


def test_small_vectors_and_other_hosts_are_averaged_by_messages():
    small = {"elements": ELEMENTS // 2}
    assert messages(run(Mapped(), sharing(), **small)) == messages(run(stripes, sharing(), **small))
    apart = Machine(cores=4, per_host=2, maps_memory=True)
    two_hosts = run(Mapped(), apart)
    extra = 4 * 2  # the workers ask each other once
    assert messages(two_hosts) == messages(run(stripes, apart)) + extra


def test_a_worker_that_dies_ends_the_average_for_the_others():
    with pytest.raises(PeerLost):
        run(
            Mapped(),
            sharing(vectors=TOUCHED),
            steps=40,
            network=Network.parse("1Gbit,1ms"),
            faults=Faults().kill(1, 0.01),
        )


def test_workers_share_no_memory_under_a_codec_that_is_averaged_in_flight_either():
    mean = Mapped()
    ours, theirs = (copy(InFlight(mean, stripes)) for _ in range(2))
    assert ours._mean is not theirs._mean
    assert mean not in (ours._mean, theirs._mean)


def test_processes_of_one_machine_map_memory_and_hosts_do_not():
    wiring = {"processes": Wiring(), "grpc": Wiring()}
    profile = Profile("here", 4, transports=wiring)
    assert profile.machine("processes", per_host=4).maps_memory
    assert not profile.machine("grpc").maps_memory
