"""Several servers that own a slice each: the same result as one, for every rule that is element-wise."""

import pytest
import torch
from central import Drawn, name

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Link, Network
from shoal.strategies import (
    ASGD,
    DCASGD,
    EAMSGD,
    EASGD,
    SSP,
    AsyncDiLoCo,
    Downpour,
    HALoS,
    Hierarchical,
    Hogwild,
    SoftSync,
    StalenessAware,
    SyncServer,
)
from shoal.testing.problems import Slope, simulate

STRATEGIES = [
    ASGD(),
    StalenessAware(),
    SoftSync(collect=2),
    SoftSync(wait=True),
    SSP(bound=0),
    SSP(bound=1),
    SSP(bound=None),
    DCASGD(),
    DCASGD(adaptive=False),
    SyncServer(),
    SyncServer(backup=1),
    Hierarchical(groups=2),
    Hogwild(),
    Downpour(n_fetch=2, n_push=3),
    Downpour(optimizer="momentum"),
    Downpour(optimizer="adagrad", rate=0.5),
    Downpour(overlap=True, n_push=2),
    Downpour(warm_start=4),
    AsyncDiLoCo(period=2),
    HALoS(period=2, exchange=2),
    AsyncDiLoCo(period=2, activation=0.2, grace=0.5),
    EASGD(rate=0.3, period=2),
    EAMSGD(rate=0.3, period=2),
]
LONG, SHORT = [0.9, -0.4, 0.2, 0.7, -1.1], [0.9, -0.4]
LOOSE = {"workers": 3, "steps": 5, "compute": Compute(mean=1.0, jitter=0.4)}


class Lengths(Instrument):
    """How long the vectors are that each server is sent."""

    def __init__(self):
        self.of = {}

    def receive(self, node, m):
        if m.tag == "push":
            self.of.setdefault(node.rank, set()).add(m.body.numel())


@pytest.mark.parametrize("start", [LONG, SHORT], ids=["5", "2"])
@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
def test_any_number_of_shards_gives_the_same_result(strategy, shards, start):
    # neither 2 nor 3 divides 5, and 3 shards of 2 elements leave one empty
    whole = simulate(strategy, Drawn(lr=0.1), start=start, **LOOSE)
    cut = simulate(strategy, Drawn(lr=0.1), start=start, shards=shards, **LOOSE)
    assert torch.allclose(cut.solution, whole.solution, rtol=0, atol=1e-15)  # a slice's end may not be fused
    assert cut.solution.tolist() != start


@pytest.mark.parametrize(
    ("numel", "shards", "lengths"), [(5, 2, [2, 3]), (5, 3, [1, 2, 2]), (2, 3, [0, 1, 1])]
)
def test_each_shard_owns_and_is_sent_its_slice_alone(numel, shards, lengths):
    seen = Lengths()
    run = simulate(ASGD(), Slope(), workers=2, steps=2, start=[0.0] * numel, shards=shards, observers=[seen])
    assert [node.x.numel() for node in run.nodes[2:]] == lengths
    assert seen.of == {2 + shard: {length} for shard, length in enumerate(lengths)}


def test_the_solution_is_the_shards_end_to_end():
    run = simulate(ASGD(), Slope(gradients=(0.0,)), steps=1, start=[0.0, 1.0, 2.0, 3.0, 4.0], shards=3)
    assert run.solution.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [node.x.tolist() for node in run.nodes[1:]] == [[0.0], [1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("strategy", [ASGD(), SSP(bound=0), SyncServer(), Hogwild(), EASGD()], ids=name)
def test_every_worker_leaves_with_all_the_shards(strategy):
    run = simulate(strategy, Drawn(lr=0.1), start=LONG, shards=3, **LOOSE)
    assert all(torch.equal(run.worker(rank).x, run.solution) for rank in range(3))


def test_what_is_kept_beside_the_model_is_cut_up_too():
    # sums of squares of the adaptive rules: 2 and 3 elements, not 5
    for strategy, kept in ((Downpour(optimizer="adagrad", rate=0.5), "memory"), (DCASGD(), "mean square")):
        run = simulate(strategy, Drawn(lr=0.1), start=LONG, shards=2, **LOOSE)
        assert [node.variables.state()[kept].numel() for node in run.nodes[3:]] == [2, 3]


def test_shards_do_not_wait_for_each_other():
    # The way to the second shard takes worker 1 a second longer. So the two gradients reach the shards in
    # different order, and each is behind on one of them only.
    links = {(1, 3): Link(latency=1.0)}
    compute = Compute(mean=1.0, slow={0: 1.5})
    run = simulate(
        ASGD(), Slope(), workers=2, start=[0.0, 0.0], shards=2, network=Network(links=links), compute=compute
    )
    # worker 0 pushes to both at 1.5 s; worker 1 hears from the second shard at 1 s and pushes at 2 s
    assert run.solution.tolist() == [-2.0, -2.0]
    assert [dict(node.meter.staleness) for node in run.nodes[2:]] == [{0: 1, 1: 1}, {0: 1, 1: 1}]
    assert run.server.version == 2


@pytest.mark.parametrize(
    "strategy",
    [ASGD(), SSP(bound=0), SSP(bound=1), SyncServer(), SoftSync(wait=True), Hogwild(), Downpour(n_push=2)],
    ids=name,
)
def test_shards_agree_with_one_server_also_on_the_batches_of_a_dead_worker(strategy):
    # worker 2 leaves three batches undone; the others, who differ in pace, do them together
    options = {
        "workers": 3,
        "steps": 6,
        "start": [0.9, -0.4, 0.2],
        "compute": Compute(mean=1.0, slow={1: 1.5}),
        "faults": Faults().crash(rank=2, step=3),
    }
    whole = simulate(strategy, Drawn(lr=0.1), **options)
    cut = simulate(strategy, Drawn(lr=0.1), shards=2, **options)
    assert [node.meter.dropped for node in cut.nodes[3:]] == [0, 0]
    assert torch.allclose(cut.solution, whole.solution, rtol=0, atol=1e-15)
