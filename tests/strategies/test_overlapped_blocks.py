"""Means that are taken in one block late: worked out on paper, and what they have in common with others."""

from dataclasses import dataclass, replace

import pytest
import torch
from blockwise import Bowls, Path
from ending import simulate_loops

from shoal.codecs import CODECS
from shoal.sim import Compute, Faults, Network
from shoal.strategies import BMUF, DiLoCo, Local, Single, SlowMo
from shoal.testing.problems import Problem, Slope, simulate
from shoal.vocabulary.node import Node


class PlainMean:
    """What `local` does with the mean m of what the workers moved."""

    def step(self, w, m):
        return w + m


@dataclass
class Momentum:
    """BMUF's and SlowMo's step without, BMUF's and DiLoCo's with Nesterov momentum."""

    momentum: float
    rate: float
    nesterov: bool
    velocity: float = 0.0

    def step(self, w, m):
        self.velocity = self.momentum * self.velocity + self.rate * m
        return w + (self.rate * m + self.momentum * self.velocity if self.nesterov else self.velocity)


STRATEGIES = {
    "local": (Local(period=2, overlap=1), PlainMean),
    "bmuf": (BMUF(period=2, momentum=0.5, warmup=0, overlap=1), lambda: Momentum(0.5, 1.0, True)),
    "slowmo": (SlowMo(period=2, momentum=0.5, rate=0.75, overlap=1), lambda: Momentum(0.5, 0.75, False)),
    "diloco": (DiLoCo(period=2, momentum=0.5, rate=0.5, overlap=1), lambda: Momentum(0.5, 0.5, True)),
}
each = pytest.mark.parametrize("word", STRATEGIES)


def at_once(strategy):
    """The same strategy without an overlap."""
    return replace(strategy, overlap=0)


def solution(run):
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(run.workers))
    assert torch.equal(run.strategy.solution(Node(run.worker(0))), run.worker(0).x)
    return run.worker(0).x.item()


def test_three_blocks_by_hand():
    # Workers move by -1 and -3 in a block, so the mean of each is -2.
    #   block 1:  x_0 = 0 - 1                  the mean of the first is under way
    #   block 2:  W = -2,  x_0 = -2 - 1 = -3   its own of the second is on top of the mean of the first
    #   block 3:  W = -4,  x_0 = -4 - 1 = -5
    #   the end:  W = -6
    seen = Path()
    problem = Slope(lr=0.5, gradients=(1.0, 3.0))
    run = simulate(Local(period=2, overlap=1), problem, workers=2, steps=6, observers=[seen])
    assert seen.x == [-0.5, -1.0, -1.5, -3.0, -3.5, -5.0]
    assert solution(run) == -6.0
    assert run.worker(0).merged == 12


def recurrence(outer, problem, workers, blocks, start):
    """W after each block is taken in, by the recurrence in floats; the last of them is the solution."""
    w, sent, path = start, None, []
    xs = [start] * workers
    for _ in range(blocks):
        begun = list(xs)
        for k in range(workers):
            for _ in range(2):
                xs[k] -= problem.lr * problem.gradient(k, 0, xs[k])
        moved = [x - x0 for x, x0 in zip(xs, begun, strict=True)]
        if sent is not None:
            w = outer.step(w, sum(sent) / workers)
            path.append(w)
        xs, sent = [w + m for m in moved], moved
    return [*path, outer.step(w, sum(sent) / workers)]


@each
@pytest.mark.parametrize("workers", [1, 2])
def test_the_recurrence(word, workers):
    strategy, outer = STRATEGIES[word]
    problem = Bowls(lr=0.25)
    expected = recurrence(outer(), problem, workers, 5, 8.0)
    for blocks in (1, 2, 5):
        run = simulate(strategy, problem, workers=workers, steps=2 * blocks, start=[8.0])
        ends = recurrence(outer(), problem, workers, blocks, 8.0)
        assert solution(run) == pytest.approx(ends[-1], abs=1e-12)
        assert ends[:-1] == expected[: blocks - 1]  # the end is all that a shorter run does otherwise


def test_one_worker_s_average_is_serial_training():
    late = simulate(Local(period=2, overlap=1), Bowls(lr=0.25), steps=11, start=[8.0])
    alone = simulate(Single(), Bowls(lr=0.25), steps=11, start=[8.0])
    assert solution(late) == pytest.approx(alone.worker(0).x.item(), abs=1e-12)


@each
@pytest.mark.parametrize("steps", [1, 2, 8, 11])
def test_where_moves_do_not_depend_on_the_model_it_ends_where_it_would_without_an_overlap(word, steps):
    strategy, _ = STRATEGIES[word]
    slopes = Slope(lr=0.5, gradients=(1.0, 3.0, -2.0), counts=(1, 2, 3))
    late, prompt = (simulate(each, slopes, workers=3, steps=steps) for each in (strategy, at_once(strategy)))
    assert solution(late) == pytest.approx(solution(prompt), abs=1e-12)
    assert late.worker(0).merged == prompt.worker(0).merged == 6 * steps


@each
def test_elsewhere_it_does_not(word):
    strategy, _ = STRATEGIES[word]
    late, prompt = (
        simulate(each, Bowls(lr=0.25), workers=2, steps=8, start=[8.0])
        for each in (strategy, at_once(strategy))
    )
    assert abs(solution(late) - solution(prompt)) > 1e-3


@dataclass(frozen=True)
class Batches(Problem):
    """Element `rank * steps + step` counts that batch."""

    steps: int = 1

    def gradient(self, rank, step, x):
        g = torch.zeros_like(x)
        g[rank * self.steps + step] = -1.0
        return g


@pytest.mark.parametrize("warmup", [0, 3])
def test_every_batch_counts_once(warmup):
    strategy = Local(period=3, warmup=warmup, overlap=1)
    run = simulate(strategy, Batches(steps=11), workers=2, steps=11, start=[0.0] * 22)
    assert run.worker(0).x.tolist() == [0.5] * 22


def test_the_steps_of_a_warmup_are_merged_at_once():
    # a step each of -0.5 and -1.5: both stand at -1 after the first step, at -2 after the second
    seen, problem = Path(), Slope(lr=0.5, gradients=(1.0, 3.0))
    strategy = BMUF(period=2, warmup=2, overlap=1)
    simulate(strategy, problem, workers=2, steps=4, observers=[seen])
    assert seen.x == [-1.0, -2.0, -2.5, -3.0]


def test_nobody_waits_for_a_mean_that_takes_no_longer_than_a_block():
    times = {
        overlap: simulate(
            Local(period=4, overlap=overlap),
            Slope(),
            workers=2,
            steps=40,
            compute=Compute(1.0),
            network=Network(latency=0.5),
        ).seconds
        for overlap in (0, 1)
    }
    assert times == {0: 40 + 10 * 1.0, 1: 40 + 1.0}  # two trips; those of the last mean are waited for


def test_at_a_fixed_rate_slowmo_is_bmuf_without_nesterov_momentum_late_as_at_once():
    strategy, _ = STRATEGIES["slowmo"]
    bmuf = BMUF(period=2, momentum=0.5, rate=0.75, nesterov=False, warmup=0, overlap=1)
    runs = [simulate(each, Bowls(lr=0.25), workers=2, steps=9, start=[8.0]) for each in (strategy, bmuf)]
    assert solution(runs[0]) == pytest.approx(solution(runs[1]), abs=1e-12)


def elastic_run(strategy, faults, steps=8, workers=3, **slow):
    compute = Compute(1.0, **slow)
    settings = {"workers": workers, "steps": steps, "compute": compute, "faults": faults}
    return simulate(strategy, Slope(), elastic=True, **settings)


def test_survivors_of_a_death_lose_no_step_and_what_is_under_way_is_formed_again():
    """Gradients are 1 and take a second; worker 2 dies at 4.5 s, while the mean of block 2 is under way.

    At 6 s the two that are left form that mean again, and take in that of block 3 at once.
    """
    run = elastic_run(Local(period=2, overlap=1), Faults(noticed_after=0.1).kill(2, 4.5))
    assert [run.worker(k).x.item() for k in (0, 1)] == [-8.0, -8.0]
    assert [run.worker(k).membership.completed for k in (0, 1)] == [4, 4]
    assert not any(run.worker(k).averages.open for k in (0, 1))


def test_who_comes_later_to_a_mean_begins_it_among_those_who_are_left():
    """Worker 0 begins the mean of block 1 at 2 s, with worker 2, who dies; worker 1 at 6 s, without it."""
    faults = Faults(noticed_after=0.1).kill(2, 2.3)
    run = elastic_run(Local(period=2, overlap=1), faults, slow={1: 3.0})
    assert [run.worker(k).x.item() for k in (0, 1)] == [-8.0, -8.0]


def test_block_momentum_that_is_late_follows_the_number_of_workers():
    """By hand: blocks of 1 step, every update is -1. eta is 1 - 1/2 with two workers, 0 with one.

    Block 1 is under way in block 2; at its end delta = -1, W = -1 - 0.5 = -1.5. Worker 1 dies in block 3, at
    whose end worker 0 alone takes in blocks 2 and 3: delta = -1 both times, W = -2.5, then -3.5.
    """
    faults = Faults(noticed_after=0.1).kill(1, 2.5)
    run = elastic_run(BMUF(period=1, warmup=0, overlap=1), faults, steps=3, workers=2)
    assert run.worker(0).x.item() == -3.5


@each
@pytest.mark.parametrize("lengths", [(7, 7), (4, 9), (9, 1)])
def test_loops_of_different_lengths_end_with_the_same_model_and_every_sample(word, lengths):
    strategy, _ = STRATEGIES[word]
    run = simulate_loops(strategy, Bowls(lr=0.25), lengths, start=[8.0])
    models = [strategy.solution(Node(run.worker(k))).item() for k in range(2)]
    assert models[0] == models[1] < 8.0
    assert run.worker(0).merged == sum(lengths)


@pytest.mark.parametrize("kind", [Local, BMUF, SlowMo, DiLoCo])
def test_more_than_one_block_is_refused(kind):
    with pytest.raises(ValueError, match="overlap=2: a mean is taken in at once"):
        kind(overlap=2)


def test_a_penalty_beside_it_is_refused():
    with pytest.raises(ValueError, match="overlap=1 and a penalty"):
        Local(overlap=1, penalty=1.0)


@pytest.mark.parametrize("moment", [1.5, 2.5])
def test_a_worker_that_is_left_alone_brings_all_of_its_late_mean_whatever_the_codec(moment):
    """Slope 1, 8 steps of 1: a mean under way that is begun again by one worker is not compressed."""
    left = simulate(
        Local(period=2, overlap=1),
        Slope(),
        workers=2,
        steps=8,
        start=[0.0] * 100,
        elastic=True,
        codec=CODECS.read("top_k:density=0.01"),
        compute=Compute(1.0),
        faults=Faults(noticed_after=0.1).kill(1, moment),
    ).worker(0)
    assert left.x.mean().item() == pytest.approx(-8.0)
