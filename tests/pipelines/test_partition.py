"""Cuts: the best of all, by trying all."""

import random
from itertools import combinations, pairwise

import pytest

from shoal.pipelines.layer_costs import LayerCost
from shoal.pipelines.partition import balanced, stage_seconds


def layers(*seconds, sent=0, state=0, activation=0):
    return [
        LayerCost(f"layer{i}", s, 0.0, sent, sent, activation, state_bytes=state)
        for i, s in enumerate(seconds)
    ]


def test_the_slowest_stage_is_as_fast_as_possible():
    assert balanced(layers(1, 2, 3, 4, 5), 2, 4) == (0, 3, 5)  # 6 and 9
    assert balanced(layers(9, 1, 1, 1), 2, 4) == (0, 1, 4)


def test_a_cut_where_little_is_sent_is_preferred():
    costs = layers(2, 2, 2, 2)
    wide = LayerCost("wide", 2, 0.0, 0, output_bytes=100)
    after = LayerCost("after", 2, 0.0, 100, 0)
    costs[1:3] = [wide, after]
    assert balanced(costs, 2, 4) == (0, 2, 4)
    assert balanced(costs, 2, 4, seconds_per_byte=0.1) == (0, 1, 4)  # 6 s rather than 4 + 10


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(0, 9) for _ in range(10)]
    costs = [
        LayerCost(str(i), draw.random(), draw.random(), sizes[i], sizes[i + 1] if i < 8 else 0)
        for i in range(9)
    ]
    stages, per_byte = draw.randint(1, 5), 0.1

    def slowest(bounds):
        return max(stage_seconds(costs, a, b, per_byte) for a, b in pairwise(bounds))

    tried = [slowest((0, *cuts, 9)) for cuts in combinations(range(1, 9), stages - 1)]
    assert slowest(balanced(costs, stages, 4, per_byte)) == pytest.approx(min(tried))


def test_memory_moves_the_cut():
    costs = layers(1, 1, 1, 9, state=10, activation=1)
    assert balanced(costs, 2, 8) == (0, 3, 4)
    # stage 0 keeps 2 microbatches in flight: 3 * (10 + 2 * 1) = 36 does not fit, 24 does
    assert balanced(costs, 2, 8, memory=[35, 35]) == (0, 2, 4)
    assert balanced(costs, 2, 1, memory=[35, 35]) == (0, 3, 4)  # with 1 microbatch there is 1: 33


def test_devices_may_have_different_memory():
    assert balanced(layers(1, 1, 1, 1, state=10), 2, 4, memory=[10, 30]) == (0, 1, 4)


def test_what_does_not_fit_is_refused_with_the_largest_layer():
    costs = [*layers(1, 1, state=10), LayerCost("huge", 1, 1, state_bytes=2_000_000)]
    with pytest.raises(
        ValueError, match=r"no cut into 2 stages fits devices with 1.00 MB: .*'huge' takes 2.00 MB"
    ):
        balanced(costs, 2, 4, memory=[1_000_000, 1_000_000])


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_without_layers_are_refused(stages):
    with pytest.raises(ValueError, match=f"3 layers cannot form {stages} stages"):
        balanced(layers(1, 1, 1), stages, 4)
