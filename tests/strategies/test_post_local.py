"""Post-local SGD: worked out on paper, and its identities."""

import pytest
import torch
from blockwise import Bowls
from ending import simulate_loops

from shoal.engine.engine import Instrument
from shoal.strategies import Local, PostLocal, Single, Sync
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.node import Node


def ends(run):
    return [node.x.tolist() for node in run.nodes]


def test_gradients_are_averaged_before_the_switch_and_models_after_it():
    # together, both follow the mean gradient of x (curvature 1, target 0) and (x - 4) / 2
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4) / 2) / 2
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 - 4) / 2) / 2
    # alone, worker 0 halves its distance to 0 at each step; worker 1 keeps 3/4 of its distance to 4
    x4 = (x2 / 4 + 4 + (x2 - 4) * 9 / 16) / 2
    x6 = (x4 / 4 + 4 + (x4 - 4) * 9 / 16) / 2
    strategy, problem = PostLocal(switch=2, period=2), Bowls(lr=0.5)
    runs = [simulate(strategy, problem, workers=2, steps=k, start=[8.0]) for k in (1, 2, 4, 6)]
    assert [ends(run) for run in runs] == [[[x]] * 2 for x in (x1, x2, x4, x6)]


def test_momentum_of_the_steps_together_goes_on_into_the_first_block_and_is_forgotten_after_it():
    # velocities 1, 3/2 together; 7/4, 15/8 in the first block; 1, 3/2 in the second
    run = simulate(PostLocal(switch=2, period=2), Slope(momentum=0.5), workers=2, steps=6)
    assert ends(run) == [[-(1 + 1.5 + 1.75 + 1.875 + 1 + 1.5)]] * 2
    kept = simulate(
        PostLocal(switch=2, period=2, reset_momentum=False), Slope(momentum=0.5), workers=2, steps=5
    )
    assert ends(kept) == [[-(1 + 1.5 + 1.75 + 1.875 + 1.9375)]] * 2


@pytest.mark.parametrize("switch", [7, 8, 1000])
def test_a_switch_after_the_last_step_is_synchronous_sgd_bit_for_bit(switch):
    problem = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))  # no short binary form: bits, not numbers
    options = {"workers": 3, "steps": 7, "start": [0.7, -0.1]}
    run = simulate(PostLocal(switch=switch, period=2), problem, **options)
    sync = simulate(Sync(), problem, **options)
    assert ends(run) == ends(sync)
    assert [node.merged for node in run.nodes] == [node.merged for node in sync.nodes]
    assert [node.meter.bytes_sent for node in run.nodes] == [node.meter.bytes_sent for node in sync.nodes]


@pytest.mark.parametrize("reset", [True, False])
def test_a_switch_before_the_first_step_is_model_averaging_bit_for_bit(reset):
    problem = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))
    options = {"workers": 3, "steps": 8, "start": [0.7, -0.1]}  # two blocks, and one cut short
    run = simulate(PostLocal(switch=0, period=3, reset_momentum=reset), problem, **options)
    assert ends(run) == ends(simulate(Local(period=3, reset_momentum=reset), problem, **options))


def test_blocks_are_counted_from_the_switch():
    run = simulate(PostLocal(switch=3, period=4), Slope(), workers=2, steps=11)
    assert run.worker(0).meter.messages_sent == (3 + 2) * 2  # each average is a stripe and its mean


def test_a_last_short_block_is_merged_too():
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4) / 2) / 2
    x4 = (x1 / 8 + 4 + (x1 - 4) * 27 / 64) / 2
    x5 = (x4 / 2 + 4 + (x4 - 4) * 3 / 4) / 2
    run = simulate(PostLocal(switch=1, period=3), Bowls(lr=0.5), workers=2, steps=5, start=[8.0])
    assert ends(run) == [[x5]] * 2
    assert run.worker(0).merged == 10


def test_one_worker_is_single():
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(3.0,))
    alone = simulate(PostLocal(switch=4, period=3, reset_momentum=False), problem, steps=10, start=[8.0])
    assert ends(alone) == ends(simulate(Single(), problem, steps=10, start=[8.0]))


# -- loops that end at different steps -------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(2, 9), (9, 2), (5, 5), (4, 9), (6, 7), (1, 2)])
def test_a_worker_without_data_goes_on_without_weight_until_all_have_ended(lengths):
    # the slope of worker 0 is 1, that of worker 1 is 3; a step together is the mean of those that have data
    x, slopes, left = 0.0, (1.0, 3.0), list(lengths)
    for _ in range(4):  # together
        having = [slopes[k] for k in (0, 1) if left[k] > 0]
        x -= sum(having) / len(having) if having else 0.0
        left = [n - 1 for n in left]
    while max(left) > 0:  # blocks of three
        steps = [max(0, min(3, n)) for n in left]
        x -= sum(n * n * slope for n, slope in zip(steps, slopes, strict=True)) / sum(steps)
        left = [n - 3 for n in left]
    run = simulate_loops(PostLocal(switch=4, period=3), Slope(gradients=slopes), lengths)
    assert ends(run) == [[pytest.approx(x, abs=1e-12)]] * 2
    assert torch.equal(run.worker(0).x, run.worker(1).x)
    assert run.worker(0).merged == sum(lengths)


def test_loops_that_end_before_the_switch_end_as_synchronous_ones_do():
    problem, lengths = Bowls(lr=0.3), (3, 7, 5)
    run = simulate_loops(PostLocal(switch=9, period=2), problem, lengths, start=(0.7,))
    assert ends(run) == ends(simulate_loops(Sync(), problem, lengths, start=(0.7,)))


def test_the_solution_is_the_common_model_before_the_switch_and_the_average_after_it():
    strategy = PostLocal(switch=2, period=2)
    seen = []

    class Watch(Instrument):
        def step(self, node):
            if node.rank == 0:
                seen.append((strategy.solution(Node(node)).item(), node.x.item()))

    simulate(strategy, Slope(gradients=(1.0, 3.0)), workers=2, steps=6, observers=[Watch()])
    assert seen == [(-2, -2), (-4, -4), (-4, -5), (-8, -8), (-8, -9), (-12, -12)]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"period": 0}, "period=0 must be at least 1"), ({"switch": -1}, "switch=-1 must be at least 0")],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        PostLocal(**options)
