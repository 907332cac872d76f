"""The legs of a run whose crew grows: every sample comes once an epoch, whoever is there."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.core.crew_sizes import CrewSizes
from shoal.core.growth import Growth
from shoal.replicas.batches import Batches, DataPosition
from shoal.replicas.legs import Course, Leg


def test_a_leg_goes_on_where_the_one_before_stopped():
    legs = list(Course(100, 10, 2, Growth()).legs(CrewSizes.parse("1@0,2@4")))
    # 4 steps of 1 worker take 40 samples; 60 are left for 2 workers: 3 steps; then 5 steps for an epoch
    assert legs == [
        Leg(0, 1, DataPosition(), DataPosition(4, 0, 40)),
        Leg(1, 2, DataPosition(4, 0, 40), DataPosition(4 + 3 + 5, 2, 0)),
    ]


def test_a_remainder_that_the_next_crew_cannot_share_goes_with_the_last_step():
    first, second = Course(43, 10, 2, Growth()).legs(CrewSizes.parse("1@0,4@4"))
    assert first.end == second.begin == DataPosition(4, 1, 0)  # 3 samples are left, and 4 workers come
    x = torch.arange(43)
    batches = Batches(x, x, batch=10, rank=0, workers=1, seed=0, begin=first.begin, end=first.end)
    assert [len(batches.next()[0]) for _ in range(4)] == [10, 10, 10, 13]


def test_a_leg_that_would_begin_after_the_end_is_refused():
    sentence = r"the crew of 2 would begin at step 20, and the run ends after 20 steps of each worker"
    with pytest.raises(ValueError, match=sentence):
        list(Course(100, 10, 2, Growth()).legs(CrewSizes.parse("1@0,2@20")))


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_comes_once_in_every_epoch_across_legs(seed):
    draw = random.Random(seed)
    samples, batch, epochs = draw.randrange(60, 200), draw.randrange(1, 5), draw.randrange(2, 6)
    growth = Growth.parse("2@1,2@3" if draw.random() < 0.5 else None)
    sizes = sorted(draw.sample(range(1, 9), 3))
    course = Course(samples, batch, epochs, growth)
    (whole,) = course.legs(CrewSizes(((0, sizes[-1]),)))  # fewer workers take more steps, never less
    steps = [0, *sorted(draw.sample(range(1, whole.end.step), 2))]
    legs = list(course.legs(CrewSizes(tuple(zip(steps, sizes, strict=True)))))
    assert [leg.begin.step for leg in legs] == steps
    taken = torch.cat([part for leg in legs for part in drawn(leg, samples, batch, growth)])
    in_epochs = taken.reshape(epochs, samples).sort().values
    assert torch.equal(in_epochs, torch.arange(samples).expand(epochs, samples))


def drawn(leg: Leg, samples: int, batch: int, growth: Growth) -> list[torch.Tensor]:
    """What the workers of a leg take, step by step."""
    x = torch.arange(samples)
    place = {"batch": batch, "workers": leg.workers, "seed": 7, "growth": growth}
    each = [Batches(x, x, rank=rank, begin=leg.begin, end=leg.end, **place) for rank in range(leg.workers)]
    parts = [[own.next()[0] for own in each] for _ in range(leg.end.step - leg.begin.step)]
    assert all(len(part) >= 1 for step in parts for part in step), "a worker without a sample"
    return [part for step in parts for part in step]


def test_speeds_divide_the_last_step_of_a_leg_too():
    first, _ = Course(43, 10, 2, Growth()).legs(CrewSizes.parse("2@0,4@2"))
    x = torch.arange(43)
    each = [
        Batches(x, x, batch=10, rank=k, workers=2, seed=0, begin=first.begin, end=first.end) for k in (0, 1)
    ]
    for own in each:
        own.weigh([3.0, 1.0])
    parts = [[own.next()[0] for own in each] for _ in range(2)]
    assert [[len(part) for part in step] for step in parts] == [[15, 5], [17, 6]]
