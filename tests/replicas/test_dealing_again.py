"""Data that is dealt to other workers than before: every sample once an epoch."""

import random
from collections import Counter

import pytest
import torch

from shoal.replicas.batches import Batches


def crew(workers, samples=23, batch=2, seed=5):
    ids = torch.arange(samples)
    place = {"batch": batch, "workers": workers, "seed": seed}
    return [Batches(ids, ids, rank=rank, **place) for rank in range(workers)]


def step(batches):
    return [own.next()[0].tolist() for own in batches]


def test_without_a_change_it_is_the_old_deal():
    plain, again = crew(3), crew(3)
    for place, own in enumerate(again):
        own.redeal(place, 3, 0, {})
    for _ in range(12):
        assert step(plain) == step(again)


def test_what_a_lost_worker_was_dealt_comes_next():
    batches = crew(3)
    step(batches)
    lost = batches[1].next()[0].tolist()
    for own in (batches[0], batches[2]):
        own.next()
        own.redeal([0, 2].index(0 if own is batches[0] else 2), 2, 2, {1: 1})
    following = step([batches[0], batches[2]])
    assert set(lost) <= {*following[0], *following[1]}


@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_and_goes_every_sample_is_dealt_once_an_epoch(seed):
    dice = random.Random(seed)
    samples, epochs, batch = dice.randint(5, 40), dice.randint(1, 3), dice.randint(1, 3)
    workers = dice.randint(1, 5)
    batches, taken, t = crew(workers, samples, batch, seed), Counter(), 0
    while t < batches[0].end_of(epochs):
        began, period, block = t, dice.randint(1, 3), []
        while t < min(began + period, batches[0].end_of(epochs)):
            block.append(step(batches))
            t += 1
        absent = [k for k in range(1, len(batches)) if dice.random() < 0.3]
        for dealt in block:
            for place, ids in enumerate(dealt):
                taken.update(ids if place not in absent else [])
        left = [own for place, own in enumerate(batches) if place not in absent]
        size = len(left) + dice.randint(0, 2)
        for place, own in enumerate(left):
            own.redeal(place, size, t, dict.fromkeys(absent, began))
        for place in range(len(left), size):  # joiners take over the deal of one who is there
            new = crew(1, samples, batch, seed)[0]
            new.take_deal(left[0].deal())
            new.redeal(place, size, t, {})
            left.append(new)
        batches = left
    assert taken == Counter(dict.fromkeys(range(samples), epochs))
