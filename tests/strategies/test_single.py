"""One worker: plain SGD, worked out on paper."""

import pytest
import torch

from shoal.strategies import Single
from shoal.testing.problems import Quadratic, Slope, simulate


def path(problem, steps, start):
    return [
        simulate(Single(), problem, steps=k, start=[start]).worker(0).x.item() for k in range(1, steps + 1)
    ]


def test_each_step_goes_down_the_gradient_at_the_point_it_starts_from():
    x1 = 8 - 0.5 * (8 - 4)
    x2 = x1 - 0.5 * (x1 - 4)
    x3 = x2 - 0.5 * (x2 - 4)
    assert path(Quadratic(lr=0.5, targets=(4.0,)), 3, 8.0) == [x1, x2, x3] == [6.0, 5.0, 4.5]


def test_momentum_belongs_to_the_local_optimizer_and_is_counted_once():
    # v = 1, 1 + 1/2, 1 + 3/4, 1 + 7/8
    assert path(Slope(lr=1.0, momentum=0.5), 4, 0.0) == [-1.0, -2.5, -4.25, -6.125]


@pytest.mark.slow  # torch imports its compiler with the first optimizer
def test_the_small_problems_descend_as_torch_does():
    problem, x = Quadratic(lr=0.25, momentum=0.5, curvature=0.5, targets=(2.0,)), torch.tensor([8.0]).double()
    torch_sgd = torch.optim.SGD([x], lr=0.25, momentum=0.5)
    for _ in range(6):
        x.grad = 0.5 * (x - 2)
        torch_sgd.step()
    assert simulate(Single(), problem, steps=6, start=[8.0]).worker(0).x.item() == x.item()


def test_its_samples_are_counted_as_merged_at_every_step():
    node = simulate(Single(), Slope(counts=(3,)), steps=4).worker(0)
    assert (node.t, node.merged, node.samples, node.meter.messages_sent) == (4, 12.0, 12, 0)


def test_a_second_worker_is_refused():
    with pytest.raises(ValueError, match="Single runs on 1 worker, not on 2"):
        simulate(Single(), Slope(), workers=2)


def test_no_worker_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1 worker"):
        simulate(Single(), Slope(), workers=0)
