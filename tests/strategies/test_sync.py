"""Synchronous SGD: one machine on the union batch, worked out on paper."""

import pytest
import torch

from shoal.strategies import Single, Sync
from shoal.testing.problems import Problem, Quadratic, Slope, simulate


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return torch.sin(x * (rank + 1) + step) / 3


def path(problem, workers, steps, start):
    runs = [simulate(Sync(), problem, workers=workers, steps=k, start=[start]) for k in range(1, steps + 1)]
    return [run.worker(0).x.item() for run in runs]


def test_every_step_follows_the_mean_gradient_of_all_workers():
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4)) / 2
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 - 4)) / 2
    x3 = x2 - 0.5 * ((x2 - 0) + (x2 - 4)) / 2
    assert path(Quadratic(lr=0.5, targets=(0.0, 4.0)), 2, 3, 8.0) == [x1, x2, x3] == [5.0, 3.5, 2.75]


def test_momentum_acts_on_the_mean_gradient_and_is_counted_once():
    v1 = ((8 - 0) + (8 - 4)) / 2
    x1 = 8 - 0.25 * v1
    v2 = 0.5 * v1 + ((x1 - 0) + (x1 - 4)) / 2
    x2 = x1 - 0.25 * v2
    v3 = 0.5 * v2 + ((x2 - 0) + (x2 - 4)) / 2
    x3 = x2 - 0.25 * v3
    assert path(Quadratic(lr=0.25, momentum=0.5, targets=(0.0, 4.0)), 2, 3, 8.0) == [x1, x2, x3]


def test_more_workers_with_the_same_gradient_do_not_go_further():
    assert [path(Slope(lr=0.5), n, 3, 0.0)[-1] for n in (1, 2, 3, 4, 5)] == [-1.5] * 5


def test_a_worker_with_three_samples_weighs_three_times_one_with_one():
    x1 = 8 - 0.5 * (1 * (8 - 0) + 3 * (8 - 4)) / (1 + 3)
    x2 = x1 - 0.5 * (1 * (x1 - 0) + 3 * (x1 - 4)) / (1 + 3)
    assert path(Quadratic(lr=0.5, targets=(0.0, 4.0), counts=(1, 3)), 2, 2, 8.0) == [x1, x2] == [5.5, 4.25]


def test_a_worker_without_samples_does_not_pull():
    assert path(Slope(lr=1.0, gradients=(7.0, 1.0), counts=(0, 2)), 2, 2, 0.0) == [-1.0, -2.0]


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_it_equals_one_machine_on_the_union_batch(workers):
    targets, counts = tuple(float(k * k) for k in range(workers)), (1, 3)
    weights = [counts[k % 2] for k in range(workers)]  # their total, 2 workers, is a power of two: exact
    middle = sum(n * a for n, a in zip(weights, targets, strict=True)) / sum(weights)
    union = simulate(Single(), Quadratic(lr=0.5, momentum=0.5, targets=(middle,)), steps=9, start=[64.0])
    shared = Quadratic(lr=0.5, momentum=0.5, targets=targets, counts=counts)
    together = simulate(Sync(), shared, workers=workers, steps=9, start=[64.0])
    assert together.worker(0).x.item() == union.worker(0).x.item()


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_replicas_are_equal_bit_for_bit(workers):
    run = simulate(
        Sync(), Drawn(lr=0.1, momentum=0.9, counts=(1, 2, 5)), workers=workers, steps=7, start=[0.3] * 5
    )
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(workers))
    assert not torch.equal(run.worker(0).x, torch.full((5,), 0.3, dtype=torch.float64))


def test_one_worker_is_single_bit_for_bit():
    problem = Drawn(lr=0.1, momentum=0.9)
    alone = simulate(Single(), problem, steps=20, start=[0.3, 0.7])
    assert torch.equal(simulate(Sync(), problem, steps=20, start=[0.3, 0.7]).worker(0).x, alone.worker(0).x)


def test_every_worker_knows_how_many_samples_its_model_has_seen():
    run = simulate(Sync(), Slope(counts=(1, 3)), workers=2, steps=5)
    assert [run.worker(k).merged for k in (0, 1)] == [20.0, 20.0]
    assert [run.worker(k).samples for k in (0, 1)] == [5, 15]
