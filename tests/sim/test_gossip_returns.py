"""Workers without a server that die and come back, in virtual time."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from sampling import mostly_soak
from shoal.sim import Compute, Faults, Network
from shoal.strategies import ADPSGD, CHOCO, DPSGD, SGP, Gossip, GossipGraD, NoLoCo, Strom
from shoal.testing.problems import Slope, simulate

ALL = [Gossip(), ADPSGD(), DPSGD(), SGP(), SGP(overlap=1), CHOCO(), GossipGraD(), NoLoCo(period=2), Strom()]
ONE_AT_A_TIME = (ADPSGD, GossipGraD, NoLoCo)
"""They tell one other of each step: if both die, nobody knows that it was done."""

WORKERS, STEPS = 4, 10


@dataclass(frozen=True)
class Noted(Slope):
    """Writes down which batches were done."""

    done: list[tuple[int, int]] = field(default_factory=list)

    def gradient(self, rank, step, x):
        self.done.append((rank, step))
        return super().gradient(rank, step, x)


def train(strategy, problem, faults, workers=WORKERS, steps=STEPS, jitter=0.2, latency=0.01, start=0.0):
    return simulate(
        strategy,
        problem,
        start=[start],
        workers=workers,
        steps=steps,
        compute=Compute(mean=1.0, jitter=jitter),
        network=Network(latency=latency),
        faults=faults,
    )


def returns(*kills, restart_after=1.0):
    faults = Faults(noticed_after=0.1, restart_after=restart_after)
    for rank, moment in kills:
        faults = faults.kill(rank, moment)
    return faults


BOTH_AT_ONCE = ((0, 2.2), (1, 2.4), (0, 6.1))


@pytest.mark.parametrize("strategy", ALL, ids=repr)
@pytest.mark.parametrize("kills", [((1, 0.3),), ((1, 4.4),), BOTH_AT_ONCE], ids=["soon", "amid", "several"])
def test_it_does_the_rest_of_its_share_and_ends_with_the_model_of_all(strategy, kills):
    problem = Noted()
    run = train(strategy, problem, returns(*kills))
    assert run.finished == list(range(WORKERS))
    assert all(torch.equal(run.worker(0).x, run.worker(rank).x) for rank in range(WORKERS))
    times = Counter(problem.done)
    assert set(times) == {(rank, step) for rank in range(WORKERS) for step in range(STEPS)}
    again = len(kills)  # the batch it was at when it died
    if isinstance(strategy, ONE_AT_A_TIME) and kills == BOTH_AT_ONCE:
        again += 4  # two batches of each had been done before
    assert sum(times.values()) - len(times) <= again
    assert {rank for (rank, _), n in times.items() if n > 1} <= {rank for rank, _ in kills}


@pytest.mark.parametrize("strategy", [Gossip(), DPSGD()], ids=repr)
def test_who_comes_when_the_others_have_ended_comes_too_late(strategy):
    run = train(strategy, Slope(), returns((1, 9.5), restart_after=30.0))
    assert run.worker(1).t == 0
    assert run.worker(0).x.item() < -4


def test_dpsgd_goes_on_from_the_model_of_another_two_rounds_ahead_of_it():
    """By hand, with steps of exactly a second: a worker gives its model, computes, mixes, and steps.

    Worker 1 dies in its third step and is back at 4.2. Worker 0 sees that between two steps: at 5.0 it says
    that it has been in round 4, so that worker 1 is to take part from round 6 on, with 6 of its 8 batches
    left; at 6.0 it gives its model, -6. At 7.0 it hears that worker 1 takes part, which has done round 6
    alone by then: -7. They do round 7 together: -8. It is the last of worker 0; worker 1 does four more: -12.
    """
    run = train(
        DPSGD(), Slope(), returns((1, 2.5), restart_after=1.7), workers=2, steps=8, jitter=0.0, latency=0.0
    )
    assert [run.worker(rank).x.item() for rank in (0, 1)] == [-10.0, -10.0]


def test_gossip_is_helped_with_what_one_that_was_away_has_left():
    """Worker 1 is away for six of its ten steps; the others take over half of what is left, and so on."""
    problem = Noted()
    run = train(Gossip(), problem, returns((1, 2.5), restart_after=6.0))
    assert set(problem.done) == {(rank, step) for rank in range(WORKERS) for step in range(STEPS)}
    assert run.seconds < 14  # alone it would have been at it until 8.5 + 8


@pytest.mark.parametrize("strategy", mostly_soak(ALL, few=5), ids=repr)
def test_without_gradients_no_model_moves_whoever_dies_and_whenever_it_is_back(strategy):
    """What one that is back goes on from is a model, at whatever moment the other is asked for it."""
    for tenths in range(3, 95, 7):
        kills = (1, tenths / 10), (2, tenths / 10 + 2.5)
        run = train(strategy, Slope(gradients=(0.0,)), returns(*kills), start=1.0)
        assert [run.worker(rank).x.item() for rank in range(WORKERS)] == [pytest.approx(1.0)] * WORKERS


def test_steps_of_push_sum_are_as_long_as_the_learning_rate_says_whoever_dies_and_is_back():
    """All go down by 1/8 a step. Who is back brings a model some steps old, and does its rest alone.

    No share waits for the end: one that was given before others knew of the return is as old as the return.
    """
    for tenths in range(3, 380, 29):
        for away in (0.3, 4.0):
            kills = (1, tenths / 10), (2, tenths / 10 + 3)
            run = train(SGP(), Slope(lr=0.125), returns(*kills, restart_after=away), steps=40)
            assert -5 - 5 / 8 - 1e-12 <= run.worker(0).x.item() <= -5 + 2 / 8


@pytest.mark.parametrize("dead", [(2, 3), (1, 3)], ids=str)
def test_push_sum_keeps_its_weight_among_those_who_are_left(dead):
    """Of four, 0 gives to 1 and 2, and 1 to 2 and 3. Without 2 and 3 no way leads from 1 back to 0.

    All that 0 gave would be lost to it: after 80 steps its weight would be 2 to the -40.
    """
    faults = Faults(noticed_after=0.1).kill(dead[0], 5.5).kill(dead[1], 5.7)
    run = train(SGP(), Slope(lr=0.125), faults, steps=80)
    left = [run.worker(rank) for rank in range(WORKERS) if rank not in dead]
    assert [worker.variables.state()["weight"].item() for worker in left] == [1.0, 1.0]
    assert [worker.x.item() for worker in left] == [-10.0, -10.0]


def test_the_weights_of_push_sum_add_up_to_the_number_of_workers_again():
    run = train(SGP(), Slope(), returns((1, 4.4)))
    weights = [run.worker(rank).variables.state()["weight"].item() for rank in range(WORKERS)]
    assert sum(weights) == pytest.approx(WORKERS)


def test_nobody_waits_for_the_answer_of_one_that_died_and_is_back_before_it_is_looked_for():
    """Worker 1 asks before it computes, and looks for the answer afterwards; worker 2 is away shortly."""
    for tenths in range(5, 120, 4):
        run = train(ADPSGD(help=False), Slope(), returns((2, tenths / 10), restart_after=0.5), workers=3)
        assert run.finished == [0, 1, 2]


def test_nobody_waits_for_one_that_dies_and_is_back_while_another_answers():
    """Worker 0 is back and asks all; worker 2 dies and is back while it waits for the answer of worker 1."""
    kills = (0, 2.943481857993555), (1, 1.5404684330829106), (2, 3.3254252564682942)
    run = train(SGP(), Slope(), returns(*kills, restart_after=3.0))
    assert run.finished == [0, 1, 2, 3]
