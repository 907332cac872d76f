"""Data that is dealt to other workers than before: every sample once an epoch."""

import random
from collections import Counter

import pytest
import torch

from shoal.core.replica import LastDeal
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
        own.redeal(place, 3, 0, LastDeal())
    for _ in range(12):
        assert step(plain) == step(again)


def test_what_a_lost_worker_was_dealt_comes_next():
    batches = crew(3)
    step(batches)
    lost = batches[1].next()[0].tolist()
    for own in (batches[0], batches[2]):
        own.next()
        own.redeal([0, 2].index(0 if own is batches[0] else 2), 2, 2, LastDeal(undone={1: range(1, 2)}))
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
            own.redeal(place, size, t, LastDeal(dict.fromkeys(absent, range(began, t))))
        for place in range(len(left), size):  # joiners take over the deal of one who is there
            new = crew(1, samples, batch, seed)[0]
            new.take_deal(left[0].deal())
            new.redeal(place, size, t, LastDeal())
            left.append(new)
        batches = left
    assert taken == Counter(dict.fromkeys(range(samples), epochs))


def test_what_is_in_the_model_ahead_of_its_turn_does_not_come():
    """Two workers with batches of 1 have done 2 steps; worker 1 was fast, and has done 2 more, with 5 and 7.

    In the order of the epoch 4, 6, 8, 9, 10 and 11 are left of 12 samples: a step of three workers each.
    """
    ids, seed = torch.arange(12), 5
    order = Batches(ids, ids, batch=12, rank=0, workers=1, seed=seed).next()[0].tolist()
    dealt = []
    for place in range(3):
        own = Batches(ids, ids, batch=1, rank=0, workers=2, seed=seed)
        own.redeal(place, 3, 2, LastDeal(done={1: range(2, 4)}))
        dealt.append([order.index(own.next()[0].item()) for _ in range(2)])
        assert own.end_of(1) == 4
    assert dealt == [[4, 9], [6, 10], [8, 11]]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_whoever_was_fast_or_slow_every_sample_is_dealt_once_an_epoch(seed, fixed):
    """At a step of all, some have given more to the model, some less; some of them go, others come, twice."""
    dice = random.Random(seed)
    samples, batch, epochs, workers = dice.randint(12, 40), dice.randint(1, 3), 3, dice.randint(1, 4)
    ids = torch.arange(samples)
    place = {"batch": batch, "workers": workers, "seed": seed, "fixed": fixed}
    crew = [Batches(ids, ids, rank=rank, **place) for rank in range(workers)]
    taken, t = Counter(), 0
    for last in (False, False, True):
        end = crew[0].end_of(epochs)
        step = end if last else dice.randint(t, end)
        given = {
            k: end if last else dice.randint(max(t, step - 2), min(end, step + 6)) for k in range(len(crew))
        }
        gone = [k for k in given if k and dice.random() < 0.4]
        for k, own in enumerate(crew):
            for position in range(t, max(given[k], step if k not in gone else 0)):
                taken.update(own._indices(k, position).tolist())
        size = len(crew) - len(gone) + dice.randint(0, 2)
        undone = {k: range(given[k], step) for k in gone if given[k] < step}
        done = {k: range(step, given[k]) for k in given if given[k] > step}
        deal, crew, t = crew[0].deal(), [], step
        for rank in range(size):
            crew.append(Batches(ids, ids, rank=rank, **{**place, "workers": size}))
            crew[rank].take_deal(deal)
            crew[rank].redeal(rank, size, step, LastDeal(undone, done))
    assert taken == Counter(dict.fromkeys(range(samples), epochs))
