"""Sandblaster L-BFGS: the same steps, whoever computes what, however many servers hold the vectors."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import Diverged, PeerLost
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Weather
from shoal.strategies import Sandblaster
from shoal.testing import Quadratic, blobs, simulate
from shoal.testing.problems import Problem
from shoal.vocabulary.strategy import Setting

PORTIONS = 16
START = [3.0, -2.0, 1.0, 0.5, -1.0, 2.0]
GRID = 2.0**20


@dataclass(frozen=True)
class Pieces(Problem):
    """16 pieces of a convex function. Their gradients are on a grid, so that sums are exact in any order."""

    workers: int = 1
    computed: Counter = field(default_factory=Counter, compare=False)  # portion -> how often

    def portion(self, rank, step):
        return step * self.workers + rank

    def shifted(self, rank, step, x):
        return x - torch.sin(torch.arange(len(x), dtype=x.dtype) * (1 + self.portion(rank, step)))

    def gradient(self, rank, step, x):
        self.computed[self.portion(rank, step)] += 1
        v = self.shifted(rank, step, x)
        scale = torch.arange(1, len(x) + 1, dtype=x.dtype)
        g = scale * v + 0.1 * v**3
        return (g * GRID).round() / GRID

    def loss(self, rank, step, x, gradient):
        v = self.shifted(rank, step, x)
        scale = torch.arange(1, len(x) + 1, dtype=x.dtype)
        return float((scale * v**2 / 2 + 0.1 * v**4 / 4).sum())


def run(workers=2, iterations=4, options=None, problem=None, **settings):
    """`iterations` steps with all portions, shared out among so many workers."""
    strategy = Sandblaster(iterations=iterations, **(options or {}))
    steps = 60 * PORTIONS // workers
    fixed = {"start": START, "compute": Compute(1.0), "passes": 60}
    return simulate(
        strategy, problem or Pieces(workers=workers), workers=workers, steps=steps, **{**fixed, **settings}
    )


ALONE = run(workers=1)


def test_two_iterations_by_hand():
    # f is the mean of (x - 1)^2 / 2 and (x - 3)^2 / 2. At 4: f = 2.5, g = 2; |g|_1 = 2, so the first step is
    # 1/2 along -2: x = 3, f = 1, slope -2 after -4: taken. s = -1, y = -1: d = -1 and step 1, x = 2, g = 0.
    done = simulate(Sandblaster(), Quadratic(targets=(1.0, 3.0)), workers=2, steps=9, start=[4.0])
    assert done.server.x.tolist() == [2.0]
    assert done.server.t == 2  # iterations
    assert done.server.version == 3 and done.server.merged == 3 * 2  # passes over two samples
    assert done.server.meter.loss == 0.5
    assert [done.worker(rank).x.tolist() for rank in range(2)] == [[2.0], [2.0]]


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_any_number_of_shards_makes_the_same_steps(shards):
    cut = run(workers=1, shards=shards)  # 6 elements: a seventh shard has none
    assert cut.server.t == ALONE.server.t == 4
    assert torch.allclose(cut.solution, ALONE.solution, rtol=0, atol=1e-12)  # dot products in other orders


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_any_number_of_workers_makes_the_same_steps_bit_for_bit(workers):
    assert torch.equal(run(workers=workers).solution, ALONE.solution)


@pytest.mark.parametrize("push_every", [1, 3, 100])
def test_however_many_portions_are_pushed_at_once(push_every):
    assert torch.equal(run(options={"push_every": push_every}).solution, ALONE.solution)


@dataclass(frozen=True)
class Bowl(Problem):
    """w.A.w / 2 - b.w in six dimensions, the same for all."""

    def parts(self):
        rng = torch.Generator().manual_seed(3)
        root = torch.randn(6, 6, generator=rng, dtype=torch.float64)
        return root @ root.T + torch.eye(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)

    def gradient(self, rank, step, x):
        a, b = self.parts()
        return a @ x - b

    def loss(self, rank, step, x, gradient):
        a, b = self.parts()
        return float(x @ a @ x / 2 - b @ x)


def test_a_quadratic_of_six_is_solved_in_at_most_six_exact_steps():
    exact = Sandblaster(curvature=1e-9, decrease=1e-10, tolerance=1e-9)
    done = simulate(exact, Bowl(), workers=3, steps=200, start=START, shards=2)
    a, b = Bowl().parts()
    assert done.server.t <= 6
    assert torch.allclose(done.solution, torch.linalg.solve(a, b), rtol=0, atol=1e-9)


def test_l2_adds_its_share_to_loss_and_gradient():
    # f = (x - 1)^2 / 2 + 1/2 x^2: the minimum is at 1/2, where f is 1/8 + 1/8
    done = simulate(Sandblaster(l2=1.0), Quadratic(targets=(1.0,)), workers=2, steps=30, start=[4.0])
    assert done.server.x.item() == pytest.approx(0.5, abs=1e-5)
    assert done.server.meter.loss == pytest.approx(0.25, abs=1e-9)


def test_batches_of_a_part_of_the_portions_take_turns():
    problem = Pieces(workers=2)
    done = run(options={"portions": 6}, problem=problem, iterations=8)
    assert set(problem.computed) == set(range(PORTIONS))
    away = (run(iterations=40).solution - done.solution).abs().max()
    assert away < 0.5  # from 3: the batches differ


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (2, 1), (0, 5), (1, 9)])
def test_a_worker_that_crashes_changes_only_who_computes_what(rank, step):
    done = run(workers=4, faults=Faults().crash(rank=rank, step=step))
    assert torch.equal(done.solution, ALONE.solution)
    assert rank not in done.finished and len(done.finished) == 4


@pytest.mark.parametrize("moment", [0.5, 3.0, 6.2])
def test_a_push_that_some_shards_have_and_others_not_does_not_count(moment):
    slow = Network(latency=0.1, bandwidth=1e3)  # a push of 16 bytes, with its header, takes a while
    whole = run(workers=4, shards=3, network=slow)
    done = run(workers=4, shards=3, network=slow, faults=Faults().kill(2, moment))
    assert torch.equal(done.solution, whole.solution)


def test_a_slow_worker_is_not_waited_for():
    slow = Compute(1.0, slow={0: 50.0})
    done = run(workers=4, compute=slow)
    assert torch.equal(done.solution, ALONE.solution)
    three = run(workers=4, faults=Faults().kill(0, 0.0))
    assert done.server.t == 4 and done.server.version == three.server.version
    # the slow one still has its first portion when all is done: the others leave with it
    assert done.seconds < 50.0 + three.seconds
    assert done.worker(0).meter.dropped == 1 and done.worker(0).samples == 0


def test_a_crash_loses_what_was_not_pushed():
    lost = {}
    for push_every in (1, 8):
        problem = Pieces(workers=2)
        faults = Faults(noticed_after=0.0).crash(rank=1, step=5)
        done = run(options={"push_every": push_every}, iterations=1, problem=problem, faults=faults)
        lost[push_every] = sum(problem.computed.values()) - done.server.version * PORTIONS
    assert lost[1] <= 2  # the one at hand, and a copy at the end
    assert lost[8] >= 5


class Log(Instrument):
    """What is sent, by tag: how often, and the most bytes at once."""

    def __init__(self):
        self.times, self.most = Counter(), Counter()

    def send(self, node, dst, m):
        self.times[m.tag] += 1
        self.most[m.tag] = max(self.most[m.tag], m.nbytes)


def test_only_the_model_goes_down_and_gradients_go_up_and_commands_are_small():
    sizes = []
    for elements in (10, 5000):
        log = Log()
        strategy = Sandblaster(iterations=4, tolerance=0.0)
        problem = Pieces(workers=4)
        settings = {"start": [1.0] * elements, "shards": 2, "observers": [log], "passes": 60}
        done = simulate(strategy, problem, workers=4, steps=60, **settings)
        assert log.times["pull"] <= 2 * 4 * (done.server.version + 1)  # once a pass, and the result
        sizes.append(log.most["instruction"])
    assert log.most["push"] < 4 * 5000 + 200
    assert sizes[1] < 1.2 * sizes[0] < 4000  # numbers have more digits, and there are no more of them


def storm(seed):
    """A network that loses, doubles and reorders messages, and workers that die and come back."""
    dice = random.Random(seed)
    workers = dice.choice([2, 4])
    faults = Faults(noticed_after=dice.choice([0.2, 1.0]), restart_after=dice.choice([0.3, 2.0]))
    for _ in range(dice.randint(0, 4)):
        faults = faults.kill(dice.randrange(workers), dice.uniform(0.0, 40.0))
    return run(
        workers=workers,
        shards=dice.choice([1, 2, 3]),
        options={"push_every": dice.choice([1, 2, 8])},
        compute=Compute(dice.choice([0.2, 1.0]), jitter=0.5, slow={0: dice.choice([1.0, 6.0])}),
        network=Network(latency=dice.choice([0.0, 0.05])),
        weather=Weather(
            loss=dice.choice([0.0, 0.2]),
            double=dice.choice([0.0, 0.3]),
            delay=dice.choice([0.0, 0.5, 3.0]),
            until=dice.uniform(20.0, 100.0),
        ),
        retry=dice.choice([0.3, 1.0]),
        faults=faults,
        seed=seed,
    )


def check_storm(seed):
    done = storm(seed)
    assert done.server.t == 4
    assert torch.allclose(done.solution, ALONE.solution, rtol=0, atol=1e-12)
    if done._shards == 1:
        assert torch.equal(done.solution, ALONE.solution)


@pytest.mark.parametrize("seed", [*range(3), 250, 333])  # in the last two a server never hears nothing
def test_a_storm_changes_nothing(seed):
    check_storm(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 1000))
def test_a_thousand_storms_change_nothing(seed):
    check_storm(seed)


def test_a_lost_server_ends_the_run():
    with pytest.raises(PeerLost, match="server 1 was lost"):
        run(shards=2, faults=Faults().kill(3, 5.0))


# -- losses that are not finite ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cliff(Quadratic):
    """Not finite beyond 6."""

    def loss(self, rank, step, x, gradient):
        return super().loss(rank, step, x, gradient) if float(x.max()) < 6 else float("inf")


def test_a_trial_beyond_the_cliff_is_too_far():
    problem = Cliff(targets=(5.5,), curvature=0.01)  # flat: the first steps are doubled, past 6
    done = simulate(Sandblaster(), problem, workers=3, steps=60, start=[0.0], shards=2)
    assert done.solution.item() == pytest.approx(5.5, abs=1e-3)


@dataclass(frozen=True)
class Huge(Quadratic):
    """Gradients that are finite, and sums of them that are not."""

    def gradient(self, rank, step, x):
        return torch.full_like(x, 1e308)

    def loss(self, rank, step, x, gradient):
        return 1.0


def test_a_sum_that_is_not_finite_is_said():
    with pytest.raises(Diverged, match="gradients of 2 samples is inf at element 0"):
        simulate(Sandblaster(), Huge(counts=(2,)), workers=2, steps=5, start=[1.0])


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_loop_of_your_own_is_refused():
    with pytest.raises(ValueError, match=r"a loop of your own.*take shoal\.run"):
        Sandblaster().check(Setting(2, own_loop=True))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize(
    ("change", "settings", "match"),
    [
        ({"model": blobs(dropout=0.1).model}, {}, "2 is Dropout, which draws at random"),
        ({"augment": torch.neg}, {}, "augments its data at random"),
        ({}, {"checkpoint": "somewhere"}, "no step in common"),
        ({}, {"grow_batch": "2@1"}, "take a fixed batch"),
        ({}, {"codec": "fp16"}, "would do nothing; take 'downpour'"),
        ({}, {"durability": "journal"}, "cannot be put together again"),
        ({}, {"balance": True}, "each go at their own speed"),
        ({"model": lambda: Noisy(8, 3)}, {}, "draws something at random"),
    ],
)
def test_what_does_not_go_with_a_line_search_is_refused_before_training(change, settings, match):
    task = replace(blobs(dropout=0.0), **change)
    with pytest.raises(ValueError, match=match):
        shoal.run(task, "sandblaster", workers=2, transport="sim", **settings)


def test_dropout_that_is_switched_off_is_taken():
    assert shoal.run(blobs(dropout=0.0), "sandblaster", workers=2, epochs=2, transport="sim").samples == 600


def test_weight_decay_of_the_optimizer_is_refused():
    def optimizer(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, weight_decay=0.1)

    with pytest.raises(ValueError, match="weight_decay of SGD would do nothing"):
        shoal.run(replace(blobs(dropout=0.0), optimizer=optimizer), "sandblaster", workers=2, transport="sim")


@pytest.mark.parametrize(
    "options",
    [{"history": -1}, {"iterations": 0}, {"portions": 0}, {"push_every": 0}, {"curvature": 1e-5}, {"l2": -1}],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sandblaster(**options)
