"""The model moves by the sum of the updates that were acknowledged and by nothing else, exactly.

In whole numbers, and however the updates interleave: every draw is a run with other speeds and latencies.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from central import Census, Whole, name
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import mostly_soak
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.strategies import ASGD, EASGD, SSP, Downpour, Hogwild
from shoal.testing.problems import Problem, simulate

ADDING = [
    ASGD(),
    *(Downpour(*every, warmup=0) for every in ((1, 1), (1, 3), (3, 1), (2, 3), (4, 4))),
    *(Downpour(*every, overlap=True, warmup=0) for every in ((1, 1), (2, 1), (1, 2), (3, 2))),
    Downpour(warm_start=5, warmup=0),
    *(SSP(bound) for bound in (0, 1, 3, None)),
]
START = [64.0, 3.0, -10.0]

pytestmark = pytest.mark.slow


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "compute": st.builds(
            Compute,
            mean=st.just(1.0),
            jitter=st.sampled_from([0.1, 0.5, 0.9]),
            slow=st.dictionaries(st.integers(0, 2), st.floats(0.2, 5.0), max_size=2),
        ),
        "network": st.builds(
            Network,
            latency=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
            bandwidth=st.sampled_from([float("inf"), 1e4, 500.0]),
            loss=st.sampled_from([0.0, 0.2]),
        ),
    }
)
several = settings(max_examples=10, deadline=None, derandomize=True)
shards = st.sampled_from([1, 2])


@dataclass(frozen=True)
class Logged(Whole):
    """Notes down every gradient that is taken."""

    taken: list = field(default_factory=list)

    def gradient(self, rank, step, x):
        self.taken.append(super().gradient(rank, step, x))
        return self.taken[-1]


class Fixed(Problem):
    """A whole number for each worker and step, wherever x is."""

    def gradient(self, rank, step, x):
        return torch.full_like(x, float((3 * rank + 2 * step) % 5 - 1))


class Acknowledged(Instrument):
    """For each server, the sum of the steps that it told a worker it has taken."""

    def __init__(self):
        self.steps = {}
        self.moved = {}

    def send(self, node, dst, m):
        if m.tag == "push":
            self.steps[node.rank, dst, m.seq] = m.rate * m.body
        elif m.tag == "ack" and (step := self.steps.pop((dst, node.rank, m.seq), None)) is not None:
            self.moved[node.rank] = self.moved.get(node.rank, 0) - step

    def everywhere(self):
        return torch.cat([self.moved[rank] for rank in sorted(self.moved)])


class Paths(Instrument):
    """Where each worker stands after its last exchange: then it is given the centre."""

    def __init__(self):
        self.x = {}
        self._forces = defaultdict(list)  # since the last step; a part for each shard

    def step(self, node):
        self.x[node.rank] = node.x.clone()
        self._forces[node.rank].clear()

    def send(self, node, dst, m):
        if m.tag == "push" and node.t == node.work.last_step:
            self._forces[node.rank].append(m.body.clone())
            if sum(map(len, self._forces[node.rank])) == len(node.x):
                self.x[node.rank] -= torch.cat(self._forces[node.rank])


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("strategy", mostly_soak(ADDING, few=8), ids=name)
@several
@given(world=worlds, shards=shards)
def test_the_model_moves_by_what_was_acknowledged_and_that_is_every_gradient(strategy, world, shards):
    problem, acknowledged = Logged(), Acknowledged()
    run = simulate(
        strategy, problem, workers=3, steps=5, start=START, shards=shards, observers=[acknowledged], **world
    )
    assert not acknowledged.steps
    assert torch.equal(run.solution - vector(START), acknowledged.everywhere())
    assert torch.equal(acknowledged.everywhere(), -sum(problem.taken))
    assert len(problem.taken) == run.server.merged == 15


@several
@given(world=worlds, shards=shards)
def test_shared_memory_moves_by_every_gradient(world, shards):
    problem = Logged()
    run = simulate(Hogwild(), problem, workers=3, steps=5, start=START, shards=shards, **world)
    assert torch.equal(run.solution - vector(START), -sum(problem.taken))
    assert len(problem.taken) == run.server.merged == 15


@pytest.mark.parametrize("strategy", mostly_soak(ADDING, few=5), ids=name)
@several
@given(world=worlds, shards=shards, rank=st.integers(0, 2), moment=st.floats(0.0, 12.0))
def test_killing_a_worker_changes_only_which_updates_arrive(strategy, world, shards, rank, moment):
    acknowledged, faults = Acknowledged(), Faults().kill(rank, moment)
    run = simulate(
        strategy,
        Whole(),
        workers=3,
        steps=4,
        start=START,
        shards=shards,
        faults=faults,
        observers=[acknowledged],
        **world,
    )
    assert torch.equal(run.solution - vector(START), acknowledged.everywhere())
    assert run.server.merged == 12


@pytest.mark.parametrize("strategy", mostly_soak(ADDING, few=5), ids=name)
@several
@given(world=worlds, rank=st.integers(0, 2), moment=st.floats(0.0, 12.0))
def test_killing_a_worker_leaves_no_batch_undone_and_does_none_twice(strategy, world, rank, moment):
    faults = Faults().kill(rank, moment)
    run = simulate(strategy, Census(steps=4), workers=3, steps=4, start=[0.0] * 12, faults=faults, **world)
    assert run.server.x.tolist() == [1.0] * 12


@several
@given(world=worlds, period=st.integers(1, 3), shards=shards)
def test_elastic_averaging_conserves_the_centre_plus_all_workers(world, period, shards):
    # What the spring takes from one end it gives to the other; gradients alone move the sum. Halves of
    # halves of whole numbers: exact.
    paths, starts, centre = Paths(), (0.0, 8.0, 16.0), 64.0

    def replica(rank):
        return Fixed().replica(rank, vector([starts[rank], -starts[rank]]))

    run = Simulation(
        EASGD(rate=0.5, period=period),
        replica,
        workers=3,
        steps=6,
        shards=shards,
        centre=vector([centre, -centre]),
        observers=[paths],
        **world,
    ).run()
    descended = sum(float((3 * rank + 2 * step) % 5 - 1) for rank in range(3) for step in range(6))
    total = run.solution + sum(paths.x.values())
    assert total.tolist() == [centre + sum(starts) - descended, -centre - sum(starts) - descended]
    assert run.solution.tolist() != [centre, -centre]
