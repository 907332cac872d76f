"""Crashes, pauses, departures and silence, each at an exact place in virtual time."""

from dataclasses import dataclass

import pytest
import torch

from shoal.core.errors import Deadlock, PeerLost
from shoal.core.transport import Message
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.strategies import BMUF, EASGD, DiLoCo, Downpour, Local, Sync
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class LeavesEarly(Strategy):
    """Worker 1 goes home before the collective of step 2; everybody else takes part."""

    at: int = 2

    async def worker(self, w):
        async for t in w.steps():
            g = await w.grad()
            if w.rank == 1 and t == self.at:
                return
            w.descend(await w.mean(g))


@dataclass(frozen=True)
class WrongPartner(Strategy):
    """Worker 0 waits for a word that worker 1 never says; worker 1 waits too."""

    async def worker(self, w):
        async for _ in w.steps():
            await w.grad()
            await w.send(1 - w.rank, Message("hello"))
            await w.recv("hello", src=1 - w.rank)
            await w.recv("salt" if w.rank == 0 else "bread", src=1 - w.rank)


@dataclass(frozen=True)
class Silent(Strategy):
    """Worker 0 waits for an answer; worker 1 is busy for a long time and then gives it."""

    busy_seconds: float = 100.0

    async def worker(self, w):
        if w.rank == 0:
            w.x[0] = float((await w.recv("answer", src=1)).count)
        else:
            await w.engine.transport.sleep(self.busy_seconds)
            await w.send(0, Message("answer", count=42))


def build(strategy, problem, workers, steps, **options):
    start = torch.zeros(1, dtype=torch.float64)
    return Simulation(
        strategy, lambda rank: problem.replica(rank, start), workers=workers, steps=steps, **options
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_leaves_a_collective_is_named_at_once(workers):
    run = build(LeavesEarly(), Slope(), workers, 5, compute=Compute(mean=1.0))
    with pytest.raises((PeerLost, Deadlock), match="worker 1 left") as error:
        run.run()
    assert "'stripe'" in str(error.value)
    assert "worker 0" in str(error.value)
    assert "step 2" in str(error.value)
    assert run.seconds == 3.0


def test_a_worker_that_left_before_anyone_spoke_to_it_is_named_too():
    # nobody has heard of worker 1 when it goes, and those that write to it later must be told
    run = build(LeavesEarly(at=0), Slope(), 2, 5, compute=Compute(mean=1.0, slow={0: 2.0}))
    with pytest.raises((PeerLost, Deadlock), match="worker 1 left"):
        run.run()


def test_a_deadlock_names_who_waits_for_what_from_whom():
    run = build(WrongPartner(), Slope(), 2, 3, compute=Compute(mean=1.0))
    with pytest.raises(Deadlock, match="nothing can happen any more at 1 s of virtual time") as error:
        run.run()
    assert "worker 0 waits for 'salt' from worker 1 at step 0" in str(error.value)
    assert "worker 1 waits for 'bread' from worker 0 at step 0" in str(error.value)


@pytest.mark.parametrize(
    "strategy", [Sync(), Local(period=2), BMUF(period=2), DiLoCo(period=2), EASGD(0.1, 2, synchronous=True)]
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_a_server_a_crash_raises_peer_lost_that_names_the_worker(strategy, rank):
    faults = Faults().crash(rank=rank, step=5)
    with pytest.raises(PeerLost, match=f"worker {rank} was lost before it sent '(stripe|average)' to worker"):
        simulate(strategy, Slope(), workers=3, steps=9, compute=Compute(mean=1.0), faults=faults)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_crash_in_the_very_first_step_raises_peer_lost_too(rank):
    with pytest.raises(PeerLost, match=f"worker {rank} was lost"):
        simulate(Sync(), Slope(), workers=3, steps=2, faults=Faults().crash(rank=rank, step=0))


def test_a_crash_is_noticed_after_a_while():
    run = build(Sync(), Slope(), 2, 9, faults=Faults(noticed_after=30.0).crash(1, 3))
    with pytest.raises(PeerLost, match="step 3"):
        run.run()
    assert run.seconds == 30.0


def test_downpour_goes_on_with_the_others():
    faults = Faults().crash(rank=1, step=2)
    run = simulate(
        Downpour(warmup=0), Slope(lr=1.0), workers=3, steps=5, compute=Compute(mean=1.0), faults=faults
    )
    assert run.server.x.item() == -(5 + 2 + 5) - 3  # the others do what worker 1 told nobody of
    assert (run.server.version, run.server.merged) == (15, 15.0)
    assert run.server.meter.faults == ["worker 1 was lost"]
    assert sorted(run.worker(k).t for k in (0, 2)) == [6, 7]  # five of their own, three between them


def test_easgd_goes_on_with_the_others():
    faults = Faults().crash(rank=0, step=3)
    easgd, problem = EASGD(rate=0.25, period=1), Quadratic(lr=0.25, targets=(4.0,))
    run = simulate(easgd, problem, workers=3, steps=40, start=[9.0], compute=Compute(mean=1.0), faults=faults)
    # the exchange comes before the gradient that kills; the others do the 37 steps that were left
    assert run.server.version == 4 + 40 + 40 + 37 + 2  # and both exchange once more at the end
    assert run.server.meter.faults == ["worker 0 was lost"]
    assert run.server.x.item() == pytest.approx(4.0, abs=0.01)


def test_a_run_ends_when_every_worker_has_crashed():
    faults = Faults().crash(rank=0, step=1).crash(rank=1, step=2)
    run = simulate(Downpour(warmup=0), Slope(), workers=2, steps=5, compute=Compute(mean=1.0), faults=faults)
    assert run.server.version == 1 + 2


def test_a_crash_of_the_only_worker_of_sync_ends_the_run_short():
    run = simulate(Sync(), Slope(), workers=1, steps=5, faults=Faults().crash(rank=0, step=3))
    assert run.worker(0).t == 3


def test_a_pause_delays_everyone_who_waits():
    def seconds(faults):
        return simulate(Sync(), Slope(), workers=3, steps=5, compute=Compute(mean=1.0), faults=faults).seconds

    assert seconds(Faults()) == 5.0
    assert seconds(Faults().pause(rank=1, step=3, seconds=9.0)) == 14.0
    assert seconds(Faults().pause(rank=1, step=3, seconds=9.0).pause(rank=0, step=3, seconds=4.0)) == 14.0
    assert seconds(Faults().pause(rank=1, step=3, seconds=9.0).pause(rank=0, step=4, seconds=4.0)) == 18.0


def test_a_pause_changes_no_bit_of_what_is_learnt():
    problem, options = Quadratic(lr=0.3, targets=(0.1, 0.7)), {"workers": 2, "steps": 6, "start": [3.0]}
    paused = simulate(Sync(), problem, faults=Faults().pause(1, 2, 50.0), compute=Compute(1.0), **options)
    assert torch.equal(paused.worker(0).x, simulate(Sync(), problem, **options).worker(0).x)


def test_a_pause_of_one_holds_up_no_other_in_downpour():
    faults = Faults().pause(rank=1, step=0, seconds=50.0)
    run = simulate(Downpour(warmup=0), Slope(), workers=2, steps=5, compute=Compute(mean=1.0), faults=faults)
    assert run.server.meter.staleness[5] == 1  # worker 1's first push comes after all of worker 0's
    assert run.server.x.item() == -10.0


def test_faults_are_values_that_add_up():
    none = Faults()
    some = none.crash(rank=2, step=5).pause(rank=0, step=3, seconds=9.0)
    assert (none.crashes, none.pauses) == (frozenset(), {})
    assert (some.crashes, some.pauses) == ({(2, 5)}, {(0, 3): 9.0})


def test_a_wait_that_lasts_too_long_ends_with_peer_lost_after_exactly_that_time():
    run = build(Silent(), Slope(), 2, 1, network=Network(latency=0.5))
    run.worker(0).channel.timeout = 5.0
    with pytest.raises(PeerLost, match="worker 0 waited 5 s for 'answer' from worker 1 at step 0"):
        run.run()
    assert run.seconds == 5.0


def test_an_answer_in_time_is_not_late():
    run = build(Silent(busy_seconds=4.0), Slope(), 2, 1, network=Network(latency=0.5))
    run.worker(0).channel.timeout = 5.0
    assert run.run().worker(0).x.item() == 42.0
    assert run.worker(0).meter.wait_seconds == 4.5
    assert run.worker(0).meter.waited_for == {1: 4.5}


def test_an_alarm_of_an_earlier_wait_does_not_end_a_later_one():
    @dataclass(frozen=True)
    class Twice(Strategy):
        async def worker(self, w):
            for pause in (3.0, 4.0):
                if w.rank == 0:
                    await w.recv("tick", src=1)
                else:
                    await w.engine.transport.sleep(pause)
                    await w.send(0, Message("tick"))

    run = build(Twice(), Slope(), 2, 1)
    run.worker(0).channel.timeout = 5.0
    run.run()
    assert run.worker(0).meter.wait_seconds == 7.0
