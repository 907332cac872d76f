"""Servers in a tree: worked out on paper, its identities, and what becomes of it when a branch dies."""

from collections import Counter

import pytest
import torch
from central import Census, Drawn, Trail, mean, mean_staleness

from sampling import mostly_soak
from shoal.codecs import FP16
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.strategies import ASGD, Hierarchical, SoftSync, Sync, SyncServer
from shoal.testing.problems import Quadratic, Slope, simulate

WELLS = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0, 12.0), counts=(1, 3))


class Pushes(Instrument):
    """From whom each node got how many pushes."""

    def __init__(self):
        self.got = Counter()

    def receive(self, node, m):
        if m.tag == "push":
            self.got[node.rank, m.src] += 1


def test_two_groups_by_hand():
    # Workers 0 and 1 are a group, worker 2 is another; 1, 3 and 4 samples; gradients take 1, 1.25, 2.125 s.
    x, expected = 8.0, []
    for _ in range(3):
        first = (1 * (x - 0) + 3 * (x - 4)) / (1 + 3)
        second = x + 8
        x = x - 0.5 * (4 * first + 4 * second) / (4 + 4)
        expected.append(x)
    trail = Trail()
    run = simulate(
        Hierarchical(groups=2),
        Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0), counts=(1, 3, 4)),
        workers=3,
        steps=3,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 2.125}),
        observers=[trail],
    )
    assert trail.x == expected == [2.75, 0.125, -1.1875]
    assert trail.at == [2.125, 4.25, 6.375]
    assert [run.worker(k).x.item() for k in range(3)] == [expected[-1]] * 3
    assert (run.server.version, run.server.merged) == (3, 24.0)


def test_a_mean_of_means_would_be_wrong_and_is_not_what_comes_out():
    # one group of two workers, one of a single worker; each has one sample
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4) + (8 + 8)) / 3
    wrong = 8 - 0.5 * (((8 - 0) + (8 - 4)) / 2 + (8 + 8)) / 2
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0))
    run = simulate(Hierarchical(groups=2), problem, workers=3, start=[8.0])
    assert run.server.x.item() == pytest.approx(x1, rel=1e-15)
    assert x1 != pytest.approx(wrong, rel=0.1)


def test_a_gradient_takes_two_trips_to_the_server():
    # a message takes 1/4 s, a gradient 1 s: the worker pulls (1/2 s), computes, pushes; its aggregator pushes
    trail, network, compute = Trail(), Network(latency=0.25), Compute(mean=1.0)
    tree = Hierarchical(groups=1)
    simulate(tree, Slope(), workers=2, network=network, compute=compute, observers=[trail])
    assert trail.at == [0.5 + 1 + 0.25 + 0.25]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("counts", [(1,), (1, 3)])
def test_any_tree_is_the_flat_server_and_is_synchronous_sgd_exactly(groups, counts):
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0, 12.0), counts=counts)
    options = {"workers": 4, "steps": 5, "start": [8.0, -2.0]}
    loose = {"compute": Compute(mean=1.0, jitter=0.5), "network": Network(latency=0.1)}
    tree = simulate(Hierarchical(groups=groups), problem, **loose, **options)
    assert torch.equal(tree.server.x, simulate(SyncServer(), problem, **loose, **options).server.x)
    assert torch.equal(tree.server.x, simulate(Sync(), problem, **options).worker(0).x)
    assert tree.server.meter.staleness == {0: 5 * groups}


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
@pytest.mark.parametrize("shards", [1, 2])
def test_uneven_groups_with_uneven_counts_are_synchronous_sgd_up_to_rounding(groups, shards):
    problem = Drawn(lr=0.1, counts=(2, 5, 1))
    options = {"workers": 7, "steps": 3, "start": [0.9, -0.4, 0.2]}
    run = simulate(
        Hierarchical(groups=groups), problem, shards=shards, compute=Compute(1.0, jitter=0.5), **options
    )
    assert torch.allclose(run.solution, simulate(Sync(), problem, **options).worker(0).x, rtol=1e-14)
    assert all(torch.equal(run.worker(k).x, run.solution) for k in range(7))


@pytest.mark.parametrize(("groups", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_the_server_hears_from_aggregators_alone_and_they_from_their_workers(groups, sizes):
    pushes = Pushes()
    simulate(Hierarchical(groups=groups), Slope(), workers=7, steps=3, observers=[pushes])
    first, expected = 0, {}
    for group, size in enumerate(sizes):
        expected[7, 8 + group] = 3
        expected.update({(8 + group, rank): 3 for rank in range(first, first + size)})
        first += size
    assert pushes.got == expected


def test_the_others_go_on_without_a_dead_worker_by_hand():
    # Workers 0 and 1 are a group, worker 2 is another; gradients take 1, 1.25 and 1.5 s. Worker 1 dies at
    # 1.5 s in its second and last step and is missed at 3.5 s; worker 0 is the first to ask for its batch.
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4) + (8 + 8)) / 3
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 + 8)) / 2
    x3 = x2 - 0.5 * (x2 - 4)
    trail = Trail()
    run = simulate(
        Hierarchical(groups=2),
        Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0)),
        workers=3,
        steps=2,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 1.5}),
        faults=Faults(noticed_after=2.0).crash(rank=1, step=1),
        observers=[trail],
    )
    assert trail.x == pytest.approx([x1, x2, x3], rel=1e-15)
    assert run.server.merged == 6


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dead", [(0,), (4,), (3, 4)])
def test_every_batch_is_in_the_model_though_a_worker_or_a_whole_group_dies(dead, shards):
    faults = Faults()
    for rank in dead:
        faults = faults.crash(rank=rank, step=1)
    run = simulate(
        Hierarchical(groups=2),
        Census(steps=4),
        workers=5,
        steps=4,
        start=[0.0] * 20,
        shards=shards,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=faults,
    )
    assert all(share > 0 for share in run.solution.tolist())
    assert run.server.merged == 20


def test_a_tree_is_the_flat_server_also_when_a_worker_dies():
    # up to rounding: two thirds are in play
    options = {
        "workers": 3,
        "steps": 4,
        "start": [8.0, -2.0],
        "compute": Compute(mean=1.0, slow={0: 1.5, 1: 1.25}),
        "faults": Faults().crash(rank=2, step=1),
    }
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0))
    flat = simulate(SyncServer(), problem, **options)
    for groups in (1, 2, 3):
        tree = simulate(Hierarchical(groups=groups), problem, **options)
        assert torch.allclose(tree.server.x, flat.server.x, rtol=1e-12), groups


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("branch", [0, 1])
def test_workers_of_a_dead_aggregator_turn_to_the_server_and_nothing_is_lost(branch, shards):
    # It dies at 2.5 s, when everybody computes and it holds no gradient of anybody. The workers below notice
    # when they have none to give to, at 3.5 s.
    options = {"workers": 4, "steps": 5, "start": [8.0, -2.0]}
    first_shard = 4 + shards * (1 + branch)
    trail, pushes = Trail(), Pushes()
    run = simulate(
        Hierarchical(groups=2),
        WELLS,
        shards=shards,
        compute=Compute(mean=1.0),
        faults=Faults().kill(rank=first_shard, moment=2.5),
        observers=[trail, pushes],
        **options,
    )
    assert torch.equal(run.solution, simulate(Sync(), WELLS, **options).worker(0).x)
    assert (run.server.version, run.server.merged) == (5, 5 * (1 + 3 + 1 + 3))
    orphans = (0, 1) if branch == 0 else (2, 3)
    assert all(pushes.got[4, rank] == 3 for rank in orphans)  # their last three steps
    assert trail.at == [1.0, 2.0, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("eighth", range(1, 56, 9))
def test_the_run_ends_in_order_whenever_an_aggregator_dies(eighth, shards):
    # whatever it held is lost, or comes twice: one step of its three workers at most
    run = simulate(
        Hierarchical(groups=2),
        Slope(lr=0.5),
        workers=6,
        steps=4,
        start=[0.0, 0.0],
        shards=shards,
        compute=Compute(mean=1.0, slow={1: 1.5}),
        network=Network(latency=0.0625),
        faults=Faults().kill(rank=6 + shards, moment=eighth / 8 + 1 / 32),
    )
    assert all(run.worker(k).t >= 4 for k in range(6))
    assert all(abs(node.merged - 24) <= 3 for node in run.nodes[6 : 6 + shards])
    assert all(torch.equal(run.worker(k).x, run.solution) for k in range(6))


def test_the_run_goes_on_when_every_aggregator_is_dead():
    faults = Faults().kill(rank=5, moment=1.5).kill(rank=6, moment=3.0)  # when all compute
    options = {"workers": 4, "steps": 5, "start": [8.0]}
    run = simulate(Hierarchical(groups=2), WELLS, compute=Compute(mean=1.0), faults=faults, **options)
    assert torch.equal(run.server.x, simulate(Sync(), WELLS, **options).worker(0).x)


def test_an_aggregator_that_dies_before_the_first_step_is_never_missed():
    options = {"workers": 4, "steps": 3, "start": [8.0]}
    faults = Faults(noticed_after=0.25).kill(rank=6, moment=0.0)
    run = simulate(Hierarchical(groups=2), WELLS, compute=Compute(mean=1.0), faults=faults, **options)
    assert torch.equal(run.server.x, simulate(Sync(), WELLS, **options).worker(0).x)


def test_aggregators_that_do_not_wait_for_all_by_hand():
    # Workers 0, 1 are a group, worker 2 is another; gradients take 1, 1.5 and 4 s; two are sent on as one.
    x0 = 8.0
    # 1.0 s worker 0 saw x0, sees x0 again; 1.5 s worker 1 saw x0
    x1 = x0 - 0.5 * ((x0 - 0) + (x0 - 4)) / 2
    # 2.0 s worker 0 saw x0, sees x1; 3.0 s worker 1 saw x1
    x2 = x1 - 0.5 * ((x0 - 0) + (x1 - 4)) / 2
    # 3.0 s worker 0 saw x1, its third, before worker 1; 4.0 s worker 2 saw x0, and must wait for a second
    # 4.5 s worker 1 saw x2, its third: worker 0's is taken with it
    x3 = x2 - 0.5 * ((x1 - 0) + (x2 - 4)) / 2
    # 8.0 s worker 2 saw x0 again, for its aggregator knew no newer
    x4 = x3 - 0.5 * (x0 + 8)
    # 12.0 s worker 2 saw x4, and nobody is left to give a second one
    x5 = x4 - 0.5 * (x4 + 8)
    trail = Trail()
    run = simulate(
        Hierarchical(groups=2, collect=2),
        Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0)),
        workers=3,
        steps=3,
        start=[x0],
        compute=Compute(mean=1.0, slow={1: 1.5, 2: 4.0}),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3, x4, x5]
    assert trail.at == [1.5, 3.0, 4.5, 8.0, 12.0]
    assert run.server.merged == 9


class Ages(Instrument):
    """How many versions of the root every gradient is behind when it is in the model, level by level.

    Needs a model whose one element is the number of its versions.
    """

    def __init__(self):
        self.leaf, self.root, self.whole = [], [], []
        self._read, self._waiting = Counter(), {}

    def receive(self, node, m):
        if m.tag == "reply":
            self._read[node.rank] = int(m.body.item())
        elif m.tag == "push" and node.identity.role > 0:
            self._waiting.setdefault(node.rank, []).append(self._read[m.src])
        elif m.tag == "push":
            held = self._read[m.src]
            for read in self._waiting.pop(m.src):
                self.leaf.append(held - read)
                self.root.append(node.version - held)
                self.whole.append(node.version - read)


@pytest.mark.parametrize("collect", mostly_soak([2, 1, 3], few=1))
def test_the_staleness_of_the_levels_adds(collect):
    ages, workers, groups = Ages(), 12, 4
    run = simulate(
        Hierarchical(groups=groups, collect=collect),
        Slope(gradients=(-1.0,)),  # with a rate of 1: every version is one more
        workers=workers,
        steps=40,
        compute=Compute(mean=1.0, jitter=0.2),
        observers=[ages],
    )
    assert run.server.x.item() == run.server.version
    aggregators = sum((node.meter.staleness for node in run.nodes[workers + 1 :]), Counter())
    assert mean_staleness(run.server.meter.staleness) == pytest.approx(groups - 1, rel=0.1)
    assert mean(ages.leaf) == pytest.approx(groups * mean_staleness(aggregators), rel=0.1)
    assert mean(ages.whole) == pytest.approx(mean(ages.leaf) + mean(ages.root))
    if collect == 1:  # as old as with one server for all
        flat = simulate(ASGD(), Slope(), workers=workers, steps=40, compute=Compute(mean=1.0, jitter=0.2))
        assert mean(ages.whole) == pytest.approx(mean_staleness(flat.server.meter.staleness), rel=0.1)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("collect", [1, 2, 5])
def test_no_gradient_is_left_with_an_aggregator(collect, shards):
    run = simulate(
        Hierarchical(groups=2, collect=collect),
        Census(steps=4),
        workers=5,
        steps=4,
        start=[0.0] * 20,
        shards=shards,
        compute=Compute(mean=1.0, jitter=0.5),
    )
    assert all(share > 0 for share in run.solution.tolist())
    assert run.server.merged == 20


@pytest.mark.parametrize(("groups", "text"), [(0, "groups=0 must be at least 1"), (-1, "groups=-1")])
def test_a_tree_without_branches_is_refused(groups, text):
    with pytest.raises(ValueError, match=text):
        Hierarchical(groups=groups)


def test_more_groups_than_workers_are_refused():
    with pytest.raises(ValueError, match=r"Hierarchical\(groups=4\) has more groups than the 3 workers"):
        simulate(Hierarchical(groups=4), Slope(), workers=3)


def test_steps_too_small_for_half_precision_reach_the_server_all_the_same():
    # the gradients fit the codec; the rate times them would not
    tiny = Slope(lr=1e-3, gradients=(1e-5, 3e-5))
    tree = simulate(Hierarchical(groups=2), tiny, workers=4, steps=2, codec=FP16())
    flat = simulate(SyncServer(), tiny, workers=4, steps=2, codec=FP16())
    assert tree.server.x.item() == pytest.approx(-4e-8, rel=2e-3)
    assert tree.server.x.item() == pytest.approx(flat.server.x.item(), rel=2e-3)


@pytest.mark.parametrize("strategy", [SyncServer(), SoftSync(), Hierarchical(groups=2)], ids=repr)
def test_a_model_in_half_precision_is_summed_in_single(strategy):
    steep = Slope(gradients=(300.0,), counts=(64,))  # 8 x 64 x 300 is no number in half precision
    start = torch.zeros(1, dtype=torch.float16)
    run = Simulation(strategy, lambda rank: steep.replica(rank, start), workers=8, steps=1).run()
    assert run.server.x.item() == -300
