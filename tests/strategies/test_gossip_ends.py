"""Whoever ends early or dies, the other workers that gossip do all their steps and come to an end."""

from itertools import product

import pytest
from central import name
from gossiping import EVERY, begin, ends, watch

from sampling import covering
from shoal.core.errors import PeerLost
from shoal.sim import Compute, Faults, Network
from shoal.strategies import ADPSGD, DPSGD, SGP, Gossip
from shoal.testing.problems import Quadratic, Slope
from shoal.vocabulary.strategy import Strategy

PROBLEM = Quadratic(lr=0.25, targets=(0.0, 4.0, 8.0))
ROUGH = {"compute": Compute(1.0, jitter=0.4), "network": Network(latency=0.3)}
PLACES = [8.0, 0.0, 4.0, -8.0, 16.0]


def some(names, values, each):
    """So many of the values for every strategy; the rest is soak."""
    ids = lambda value: name(value) if isinstance(value, Strategy) else str(value)  # noqa: E731
    return pytest.mark.parametrize(names, covering([*product(EVERY, values)], each), ids=ids)


@some(("strategy", "victim", "step"), [(0, 0), (0, 3), (1, 2), (4, 0), (4, 5)], each=2)
def test_a_worker_that_dies_hangs_nobody(strategy, victim, step):
    faults = Faults().crash(rank=victim, step=step)
    run, paths = watch(strategy, PLACES, PROBLEM, steps=6, faults=faults, **ROUGH)
    others = [k for k in range(5) if k != victim]
    assert all(len(paths.x[k]) == 6 for k in others)
    assert len(paths.x.get(victim, ())) == step
    assert run.finished == others
    assert len({ends(run)[k] for k in others}) == 1  # they still take the mean, of those who are left


@some(("strategy", "moment"), [0.0, 0.9, 2.6, 4.4, 6.1, 6.9, 7.3, 7.7, 8.0, 8.3], each=3)
def test_so_it_is_whenever_it_is_killed_also_at_the_very_end(strategy, moment):
    faults = Faults(noticed_after=0.2).kill(2, moment)
    run, paths = watch(strategy, PLACES, PROBLEM, steps=6, faults=faults, **ROUGH)
    assert {0, 1, 3, 4} <= set(run.finished)
    assert all(len(paths.x[k]) == 6 for k in (0, 1, 3, 4))


@pytest.mark.parametrize("strategy", EVERY, ids=name)
def test_all_but_one_may_die(strategy):
    faults = Faults()
    for k in (0, 1, 3, 4):
        faults = faults.crash(rank=k, step=k)
    run, paths = watch(strategy, PLACES, PROBLEM, steps=6, faults=faults, **ROUGH)
    assert run.finished == [2]
    assert len(paths.x[2]) == 6


@pytest.mark.parametrize("strategy", EVERY, ids=name)
@pytest.mark.parametrize("steps", [(1, 9, 4, 0, 6), (9, 1, 1, 1, 1), (2, 2, 2, 2, 9)])
def test_workers_may_take_different_numbers_of_steps(strategy, steps):
    run, paths = begin(strategy, PLACES, PROBLEM, steps=9, **ROUGH)
    for node, own in zip(run.nodes, steps, strict=True):
        node.work.last_step = own
    run.run()
    assert tuple(len(paths.x.get(k, ())) for k in range(5)) == steps
    assert len(set(ends(run))) == 1


@pytest.mark.parametrize("strategy", EVERY, ids=name)
def test_nobody_is_done_in_vain_though_speeds_differ_much(strategy):
    slow = {"compute": Compute(1.0, jitter=0.3, slow={0: 20.0, 3: 0.05}), "network": Network(latency=0.3)}
    run, paths = watch(strategy, PLACES, PROBLEM, steps=6, **slow)
    assert all(len(paths.x[k]) == 6 for k in range(5))
    assert len(set(ends(run))) == 1


@pytest.mark.parametrize("strategy", EVERY, ids=name)
def test_who_is_done_is_patient_with_who_is_not(strategy):
    # worker 0 takes 3 s for a step; the others, who give up after 4 s of silence, are done long before
    run, paths = begin(strategy, PLACES, PROBLEM, steps=9, compute=Compute(1.0, slow={0: 3.0}))
    for node in run.nodes:
        node.channel.timeout = 4.0
        node.work.last_step = 9 if node.rank == 0 else 1
    run.run()
    assert len(paths.x[0]) == 9
    assert run.finished == [0, 1, 2, 3, 4]


def test_but_not_with_one_that_has_fallen_silent():
    run, _ = begin(DPSGD(), PLACES, PROBLEM, steps=2, compute=Compute(1.0, slow={0: 100.0}))
    for node in run.nodes:
        node.channel.timeout = 4.0
    with pytest.raises(PeerLost, match="waited 4 s for 'round' from worker 0"):
        run.run()


@pytest.mark.parametrize("strategy", EVERY, ids=name)
def test_samples_of_all_are_counted_at_the_end(strategy):
    run, _ = watch(strategy, PLACES, Slope(counts=(1, 3)), steps=4)
    assert all(run.worker(k).merged == 4 * (1 + 3 + 1 + 3 + 1) for k in range(5))


def test_the_weight_of_a_dead_neighbour_stays_with_oneself_by_hand():
    # a ring of three with shares of 1/3; worker 2 dies in its second step, of which nobody hears
    faults = Faults(noticed_after=0.0).crash(rank=2, step=1)
    run, paths = watch(DPSGD(overlap=False), [3.0, 6.0, 9.0], steps=3, compute=Compute(1.0), faults=faults)
    # all stand at 6 after the first step; then 0 and 1 go on, with 2/3 of themselves
    assert paths.at(0) == pytest.approx([6.0, 6.0, 6.0])
    assert ends(run)[:2] == pytest.approx([6.0, 6.0])

    uneven = Slope(gradients=(3.0, 0.0, 0.0))
    run, paths = watch(DPSGD(overlap=False), [0.0] * 3, uneven, steps=2, compute=Compute(1.0), faults=faults)
    x0, x1 = -1.0, -1.0  # (-3 + 0 + 0) / 3
    x0, x1 = 2 / 3 * (x0 - 3) + 1 / 3 * x1, 2 / 3 * x1 + 1 / 3 * (x0 - 3)
    assert [paths.x[k][1] for k in (0, 1)] == pytest.approx([x0, x1])


@pytest.mark.parametrize("strategy", [Gossip(help=False), DPSGD(), SGP(), ADPSGD(help=False)], ids=name)
def test_the_death_is_noted(strategy):
    run, _ = watch(strategy, PLACES, PROBLEM, steps=6, faults=Faults().crash(rank=1, step=2), **ROUGH)
    assert run.worker(0).meter.faults == ["worker 1 was lost"]
