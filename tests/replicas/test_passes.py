"""Passes: while workers come and go, every sample of a pass is in a batch of one of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import pytest

from shoal.replicas.passes import Passes

PASSES = 3


class Crew:
    """Workers that read in step, average every `period` steps, and die and come back in between."""

    def __init__(self, seed, *, workers, samples, batch, period, drop_last=False):
        self.dice = random.Random(seed)
        self.everybody, self.samples, self.batch, self.period = range(workers), samples, batch, period
        self.drop_last = drop_last
        self.there = {rank: Passes(rank, workers) for rank in self.everybody}
        self.dealt = list(self.everybody)
        self.counted = Counter()  # samples that are in the model
        self.brought = {rank: [] for rank in self.everybody}  # since the last average
        self.step = self.edge = 0

    def order(self, number):
        order = list(range(self.samples))
        random.Random(number).shuffle(order)
        if self.batch is None:  # batches of the user's own
            return [order[k : k + 3] for k in range(0, self.samples, 3)]
        return order

    def run(self):
        for number in range(PASSES):
            for passes in self.there.values():
                assert passes.begin(number, self.order(number), self.batch, self.drop_last)
            while self.any_left():
                self.one_step(number)
        self.average()
        return self.counted

    def any_left(self):
        lengths = {len(passes.left()) for passes in self.there.values()}
        assert len(lengths) == 1  # all take equally many steps
        return lengths.pop() > 0

    def one_step(self, number):
        for rank, passes in self.there.items():
            share = passes.left()[0]
            self.brought[rank] += share if self.batch else [i for own in share for i in own]
            passes.take(self.step, self.edge)
        self.step += 1
        if len(self.there) > 1 and self.dice.random() < 0.15:
            del self.there[self.dice.choice(list(self.there))]
        if self.step % self.period == 0:
            self.average(number)

    def average(self, number=None):
        for rank in self.there:
            self.counted.update(self.brought[rank])
        self.brought = {rank: [] for rank in self.everybody}
        absent = [place for place, rank in enumerate(self.dealt) if rank not in self.there]
        away = [rank for rank in self.everybody if rank not in self.there]
        back = [rank for rank in away if self.dice.random() < 0.5] if number is not None else []
        if absent or back:
            self.dealt = sorted([*self.there, *back])
            for rank, passes in self.there.items():
                place = self.dealt.index(rank)
                passes.redeal(place, len(self.dealt), dict.fromkeys(absent, range(self.edge, self.step)))
            state = next(iter(self.there.values())).state()
            for rank in back:
                self.there[rank] = joined = Passes()
                joined.load(state)
                joined.redeal(self.dealt.index(rank), len(self.dealt), {})
                for n in range(number + 1):  # its loop runs from the top
                    assert joined.begin(n, self.order(n), self.batch, self.drop_last) == (n == number)
        self.edge = self.step


@pytest.mark.parametrize("batch", [1, 4, None], ids=["of 1", "of 4", "batches"])
@pytest.mark.parametrize("seed", range(40))
def test_every_sample_counts_once_a_pass_whoever_dies_and_comes_back(seed, batch):
    crew = Crew(seed, workers=4, samples=53, batch=batch, period=1)
    assert crew.run() == Counter(dict.fromkeys(range(53), PASSES))


@pytest.mark.parametrize("seed", range(40))
def test_with_local_steps_a_later_pass_makes_up_for_what_died_and_the_rest_is_told(seed):
    crew = Crew(seed, workers=4, samples=53, batch=2, period=5)
    counted = crew.run()
    left_over = {passes.left_over for passes in crew.there.values()}
    assert len(left_over) == 1
    assert counted.total() == PASSES * 53 - left_over.pop()
    assert max(counted.values()) <= PASSES


@pytest.mark.parametrize("seed", range(10))
def test_drop_last_drops_what_does_not_fill_a_batch_for_each_and_doubles_nothing(seed):
    counted = Crew(seed, workers=3, samples=40, batch=4, period=1, drop_last=True).run()
    assert max(counted.values()) <= PASSES
    assert counted.total() > PASSES * 40 / 2


def stream(passes, length):
    """The indices that a worker takes of a stream, one by one."""
    for index in range(length):
        if passes.is_own(index):
            yield index


def test_a_stream_goes_on_with_those_who_are_there_and_counts_what_died():
    one, two = Passes(0, 2), Passes(1, 2)
    for passes in (one, two):
        passes.begin(0, None, 8)
    first, second = stream(one, 9), stream(two, 9)
    taken = []
    for step in range(2):
        for passes, own in ((one, first), (two, second)):
            taken.append(next(own))
            passes.take(step, step)
    one.redeal(0, 1, {1: range(1, 2)})  # the other one has died before the second average
    assert taken == [0, 1, 2, 3]
    assert one.lost == 1
    for step, index in enumerate(first, start=2):
        taken.append(index)
        one.take(step, step)
    assert taken == list(range(9))


def test_each_of_those_who_died_leaves_what_it_alone_has_not_handed_over():
    """Worker 1 was in neither of two averages, worker 2 only in the first: three batches come again."""
    passes = Passes(0, 3)
    passes.begin(0, list(range(12)), 1)
    for step in range(2):
        passes.take(step, 0)
    passes.redeal(0, 1, {1: range(2), 2: range(1, 2)})
    assert list(chain(*passes.left())) == [1, 4, 5, *range(6, 12)]
    assert passes.lost == 0


def test_what_was_dealt_before_a_checkpoint_is_counted_as_lost():
    saved = Passes(0, 2)
    saved.begin(0, list(range(12)), 1)
    for step in range(2):
        saved.take(step, 0)
    resumed = Passes(0, 2)
    resumed.begin(0, list(range(12)), 1)
    resumed.load(saved.state())
    resumed.take(2, 0)
    resumed.redeal(0, 1, {1: range(3)})  # the other one has handed over nothing
    assert resumed.lost == 2
    assert list(chain(*resumed.left())) == [5, *range(6, 12)]


def test_a_stream_that_ends_within_a_step_leaves_some_without_a_batch():
    one, two = Passes(0, 2), Passes(1, 2)
    for passes in (one, two):
        passes.begin(0, None, 8)
        for step, _ in enumerate(stream(passes, 3)):
            passes.take(step, step)
    assert not one.is_short(3)
    assert two.is_short(3)


def test_data_that_each_worker_has_for_itself_is_nobody_else_s():
    passes = Passes(0, 2)
    passes.begin(0, list(range(20)), 4, shared=False)
    own = passes.left()
    passes.take(0, 0)
    passes.redeal(0, 1, {1: range(1)})
    assert passes.lost == 1
    assert passes.left() == own[1:]
    assert list(chain(*own)) == list(range(20))


def test_a_worker_that_takes_over_finds_out_that_its_data_or_its_order_is_another():
    giver, order = Passes(0, 2), list(range(12))
    giver.begin(0, order, batch=2)

    def difference(*others, **options):
        taker = Passes(1, 2)
        taker.load(giver.state())
        taker.begin(*others, **options)
        return taker.goes_on and taker.goes_on.own.difference(taker.goes_on.theirs)

    assert difference(0, order, batch=2) is None
    assert difference(1, order[::-1], batch=2) is None  # of another pass
    assert difference(0, order[::-1], batch=2) == (
        "reads 12 samples in batches of 2, which are not those of the others or have another order"
    )
    assert difference(0, order, batch=3) == (
        "reads 12 samples in batches of 3, and the others read 12 samples in batches of 2"
    )
    assert difference(0, None, batch=2) == (
        "reads a stream in batches of 2, and the others read 12 samples in batches of 2"
    )
    assert difference(0, order[:6], batch=2, shared=False) is None  # a share of its own


@pytest.mark.parametrize("done", range(13))
def test_one_that_is_started_again_skips_what_its_predecessor_has_done(done):
    """Two workers, 11 samples in batches of 2: steps of 2, and of the remainder; 3 steps a pass, 2 passes."""

    def read(passes, least):
        """The batches of two passes from the one on that the loop is given."""
        found = []
        for number in range(PASSES):
            if passes.begin(number, list(range(11)), 2):
                for batch in passes.left():
                    passes.take(len(found), 0)
                    found.append(batch)
        return found[least:]

    whole, successor = Passes(1, 2), Passes(1, 2)
    successor.skip(done)
    batches = read(whole, done)
    assert read(successor, 0) == batches
    assert successor.batches == whole.batches


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_so_it_does_in_a_stream_whose_length_nobody_knows(done):
    """Worker 1 of 2 has the batches 1, 3 and 5 of a stream of 7."""

    def read(passes):
        found = []
        for number in range(PASSES):
            passes.begin(number, None)
            for index in range(7):
                if passes.is_own(index) and not passes.skips():
                    passes.take(0, 0)
                    found.append((number, index))
        return found

    whole, successor = Passes(1, 2), Passes(1, 2)
    successor.skip(done)
    assert read(successor) == read(whole)[done:]


@pytest.mark.parametrize("whole", [True, False])
def test_it_is_known_that_a_loop_has_left_a_pass_early(whole):
    passes = Passes(0, 2)
    passes.begin(0, list(range(11)), 2)
    for _ in range(len(passes.left()) - (not whole)):
        passes.take(0, 0)
    assert not passes.leaves_early
    passes.begin(1, list(range(11)), 2)
    assert passes.leaves_early != whole


def test_one_that_saves_before_it_has_skipped_what_is_done_skips_it_when_it_is_resumed():
    back, resumed = Passes(1, 2), Passes(1, 2)
    back.skip(3)
    resumed.load(back.state())
    assert resumed.begin(0, list(range(20)), 2)
    assert resumed.left()[0] == [13, 15] and resumed.batches == 3


def test_a_loop_that_has_left_a_pass_early_is_known_to_have_done_so_when_it_is_resumed():
    whole, resumed = Passes(0, 1), Passes(0, 1)
    whole.begin(0, list(range(20)), 2)
    whole.take(0, 0)
    whole.begin(1, list(range(20)), 2)
    assert whole.leaves_early and not resumed.leaves_early
    resumed.load(whole.state())
    assert resumed.leaves_early
