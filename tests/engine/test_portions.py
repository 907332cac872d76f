"""Every portion of a pass counts once, whoever computes it, dies with it or is silent."""

from __future__ import annotations

import random
from math import inf, nan

import pytest

from shoal.engine.portions import BUNDLES, NOTHING, Portions, Verdict

GRANTED, REFUSED, VOID = Verdict.GRANTED, Verdict.REFUSED, Verdict.VOID


def opened(portions, workers=2, **options):
    made = Portions(workers, **options)
    made.open(range(portions))
    return made


def given(portions, rank):
    """The portion that this worker is given; None if it has to wait."""
    taken = portions.take(rank)
    return None if taken is None else taken[0][1]


def test_whoever_asks_gets_the_next_and_the_clock_counts_what_it_got():
    portions = opened(5)
    assert [portions.take(0), portions.take(1), portions.take(0)] == [((1, 0), 0), ((1, 1), 0), ((1, 2), 1)]


def test_the_last_ones_are_handed_out_twice_and_the_first_claim_counts():
    portions = opened(2, workers=4)
    assert [given(portions, rank) for rank in range(4)] == [0, 1, 0, 1]  # longest out first
    assert given(portions, 0) is None  # each has two
    assert portions.claim(2, 1, 0, bundle=7, loss=1.0, samples=3) is GRANTED
    assert portions.claim(0, 1, 0, bundle=5, loss=1.0, samples=3) is REFUSED


def test_nobody_computes_the_same_portion_twice():
    portions = opened(1)
    assert given(portions, 0) == 0
    assert given(portions, 0) is None
    assert given(portions, 1) == 0


def test_near_the_end_a_worker_pushes_before_it_computes_the_next():
    portions = opened(5)
    for portion in range(2):
        assert given(portions, 0) == portion
        assert portions.claim(0, 1, portion, 0, 1.0, 1) is GRANTED
    assert given(portions, 1) == 2
    assert given(portions, 0) == NOTHING  # two are free, as many as there are workers
    assert portions.deliver(0, 1, 0) is GRANTED
    assert given(portions, 0) == 3


def test_the_loss_is_the_mean_over_all_samples_in_any_order():
    losses = {0: (0.1, 3), 1: (0.2, 1), 2: (1e16, 2), 3: (-1e16, 2)}
    found = set()
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [2, 1, 0, 3]):
        portions = opened(4, workers=1)
        for _ in order:
            given(portions, 0)
        for bundle, portion in enumerate(order):
            assert not portions.is_complete
            portions.claim(0, 1, portion, bundle, *losses[portion])
            assert portions.deliver(0, 1, bundle) is GRANTED
        assert portions.is_complete and portions.samples == 8
        found.add(portions.loss)
    assert found == {(0.1 * 3 + 0.2) / 8}


def test_a_lost_worker_gives_back_what_it_had_and_what_it_claimed():
    portions = opened(6)
    for portion in range(3):
        assert given(portions, 0) == portion
    assert given(portions, 1) == 3
    portions.claim(0, 1, 0, 0, 1.0, 1)
    assert portions.deliver(0, 1, 0) is GRANTED  # it stays
    portions.claim(0, 1, 1, 1, 1.0, 1)
    portions.give_up(0)
    assert [given(portions, 1) for _ in range(4)] == [1, 2, 4, 5]
    assert portions.deliver(0, 1, 1) is VOID
    assert portions.deliveries == ((0, 0),)


def test_a_copy_stays_out_when_one_of_two_workers_is_lost():
    portions = opened(1, workers=3)
    assert [given(portions, 0), given(portions, 1), given(portions, 2)] == [0, 0, None]
    portions.give_up(0)
    assert given(portions, 2) == 0
    assert portions.claim(1, 1, 0, 0, 1.0, 1) is GRANTED


def test_what_a_silent_worker_claimed_goes_to_others_after_its_lease():
    now = [0.0]
    portions = opened(2, workers=3, lease=60.0, now=lambda: now[0])
    assert given(portions, 0) == 0
    assert portions.claim(0, 1, 0, 0, 1.0, 1) is GRANTED
    assert [given(portions, 1), given(portions, 2)] == [1, 1]
    assert portions.claim(1, 1, 1, 0, 1.0, 1) is GRANTED
    assert portions.deliver(1, 1, 0) is GRANTED
    now[0] = 60.0
    assert given(portions, 1) is None
    now[0] = 61.0
    assert given(portions, 1) == 0
    assert portions.claim(0, 1, 0, 0, 1.0, 1) is VOID  # all that it holds has gone to another
    assert portions.deliver(0, 1, 0) is VOID
    assert portions.claim(1, 1, 0, 1, 2.0, 1) is GRANTED
    assert portions.deliver(1, 1, 1) is GRANTED
    assert portions.is_complete and portions.loss == 1.5


def test_a_portion_whose_two_workers_hang_goes_to_a_third_after_its_lease():
    now = [0.0]
    portions = opened(1, workers=4, lease=60.0, now=lambda: now[0])
    assert [given(portions, rank) for rank in range(4)] == [0, 0, None, None]
    now[0] = 60.0
    assert given(portions, 2) is None
    now[0] = 61.0
    assert [given(portions, 0), given(portions, 2), given(portions, 3)] == [None, 0, None]  # one at a time
    portions.give_up(0)
    assert given(portions, 3) is None  # two others still have it
    assert portions.claim(2, 1, 0, 0, 1.0, 1) is GRANTED
    assert portions.claim(1, 1, 0, 0, 1.0, 1) is REFUSED
    assert portions.deliver(2, 1, 0) is GRANTED
    assert portions.is_complete


def test_what_comes_after_the_pass_is_refused():
    portions = opened(1)
    given(portions, 0)
    given(portions, 1)
    portions.claim(0, 1, 0, 0, 1.0, 1)
    portions.deliver(0, 1, 0)
    assert portions.open(range(1)) == 2
    assert given(portions, 0) == 0
    assert portions.claim(1, 1, 0, 0, 1.0, 1) is REFUSED
    assert portions.deliver(1, 1, 0) is VOID


@pytest.mark.parametrize("loss", [inf, nan])
def test_a_loss_that_is_not_finite_ends_the_pass(loss):
    portions = opened(9)
    given(portions, 0)
    assert portions.claim(0, 1, 0, 0, loss, 1) is REFUSED
    assert portions.is_complete and portions.loss == inf and not portions.has_free


def test_the_last_bundle_of_each_incarnation_is_told():
    portions = opened(3, workers=1)
    for bundle in (0, 1):
        portions.claim(0, 1, given(portions, 0), bundle, 1.0, 1)
        portions.deliver(0, 1, bundle)
    portions.give_up(0)
    portions.claim(0, 1, given(portions, 0), BUNDLES, 1.0, 1)
    portions.deliver(0, 1, BUNDLES)
    assert portions.deliveries == ((0, 1), (0, BUNDLES))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_portion_is_delivered_once(seed):
    dice = random.Random(seed)
    portions = opened(dice.randint(1, 12), workers=3)
    total, sums, log = portions.samples, {}, []
    assert total == 0
    bundles = dict.fromkeys(range(3), 0)
    working: dict[int, int] = {}
    while not portions.is_complete:
        rank = dice.randrange(3)
        what = dice.random()
        if what < 0.1:  # it dies, and comes back
            portions.give_up(rank)
            sums.pop(rank, None)
            working.pop(rank, None)
            bundles[rank] += BUNDLES
        elif rank in working:
            portion = working.pop(rank)
            if portions.claim(rank, 1, portion, bundles[rank], 1.0, 1) is GRANTED:
                sums.setdefault(rank, []).append(portion)
        elif rank in sums and what < 0.4:
            if portions.deliver(rank, 1, bundles[rank]) is GRANTED:
                log += sums.pop(rank)
            bundles[rank] += 1
        elif (portion := given(portions, rank)) is not None and portion != NOTHING:
            working[rank] = portion
    assert sorted(log) == list(range(len(log))) and len(log) == portions.samples
