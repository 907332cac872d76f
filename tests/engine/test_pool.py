"""The pool: every batch is done, by its own worker or by another, however workers come and go."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.pool import Pool


def finish(pool, rank, steps):
    """The worker does all of its own share."""
    pool.commit(rank, steps)


def test_all_is_done_when_every_worker_has_done_its_share():
    pool = Pool(workers=2, steps=3)
    finish(pool, 0, 3)
    pool.commit(1, 2)
    assert not pool.finished
    pool.commit(1, 3)
    assert pool.finished


def test_nothing_is_to_be_had_while_everybody_lives():
    pool = Pool(workers=2, steps=3)
    finish(pool, 0, 3)
    assert pool.take(0) is None


def test_a_dead_worker_s_batches_are_free_from_the_first_that_is_not_in_the_model():
    pool = Pool(workers=3, steps=4)
    pool.commit(1, 2)
    pool.give_up(1)
    finish(pool, 0, 4)
    finish(pool, 2, 4)
    assert not pool.finished
    assert pool.take(0) == ((1, 2), 4)  # worker 1's third; worker 0 does it as its fifth
    assert pool.take(2) == ((1, 3), 4)
    assert pool.take(0) is None
    pool.commit(0, 5)
    assert not pool.finished  # worker 2 is still at it
    pool.commit(2, 5)
    assert pool.finished


def test_who_takes_several_does_them_one_after_the_other():
    pool = Pool(workers=2, steps=2)
    pool.give_up(1)
    finish(pool, 0, 2)
    assert pool.take(0) == ((1, 0), 2)
    pool.commit(0, 3)
    assert pool.take(0) == ((1, 1), 3)
    pool.commit(0, 4)
    assert pool.finished


def test_a_batch_that_was_lent_to_a_worker_which_dies_too_is_free_again():
    pool = Pool(workers=3, steps=2)
    pool.give_up(2)
    finish(pool, 0, 2)
    finish(pool, 1, 2)
    pool.take(0), pool.take(1)
    pool.commit(0, 3)
    pool.give_up(1)
    assert pool.take(0) == ((2, 1), 3)
    pool.commit(0, 4)
    assert pool.finished


def test_what_a_dead_worker_did_last_counts_though_it_is_told_of_late():
    pool = Pool(workers=2, steps=3)
    pool.commit(1, 1)
    pool.commit(1, 3)
    pool.give_up(1)
    finish(pool, 0, 3)
    assert pool.finished


def test_giving_up_twice_frees_nothing_twice():
    pool = Pool(workers=2, steps=2)
    pool.give_up(1)
    pool.give_up(1)
    finish(pool, 0, 2)
    assert [pool.take(0), pool.take(0), pool.take(0)] == [((1, 0), 2), ((1, 1), 3), None]


def test_old_news_takes_nothing_back():
    pool = Pool(workers=1, steps=3)
    pool.commit(0, 3)
    pool.commit(0, 1)
    assert pool.finished


def test_nobody_has_done_more_than_it_had_to():
    # a clock beyond the end, of a message that came twice or late, makes room for nothing
    pool = Pool(workers=2, steps=1)
    pool.commit(0, 7)
    pool.give_up(1)
    assert pool.take(0) == ((1, 0), 1)
    assert not pool.finished
    pool.commit(0, 2)
    assert pool.finished


def test_a_worker_that_came_back_goes_on_beside_the_slowest():
    pool = Pool(workers=3, steps=10)
    pool.commit(0, 6)
    pool.commit(1, 8)
    pool.commit(2, 3)
    pool.give_up(2)
    assert pool.take(2) == ((2, 3), 6)  # its own fourth batch again, at the clock of worker 0
    pool.commit(2, 7)
    assert pool.take(2) == ((2, 4), 7)


def test_a_worker_that_came_back_when_all_others_are_done_goes_on_where_it_was():
    pool = Pool(workers=2, steps=4)
    pool.commit(1, 3)
    pool.give_up(1)
    finish(pool, 0, 4)
    assert pool.take(1) == ((1, 3), 3)


def test_no_steps_are_done_at_once():
    assert Pool(workers=3, steps=0).finished


@pytest.mark.parametrize("through_json", [False, True])
def test_a_pool_that_was_saved_goes_on_as_it_was(through_json):
    pool = Pool(workers=3, steps=3)
    pool.commit(1, 1)
    pool.give_up(1)
    finish(pool, 0, 3)
    pool.take(0)
    state = pool.state()
    copy = Pool(workers=3, steps=3)
    copy.load(json.loads(json.dumps(state)) if through_json else state)
    for both in (pool, copy):
        both.commit(0, 4)
        finish(both, 2, 3)
    assert copy.take(2) == pool.take(2) == ((1, 2), 3)
    for both in (pool, copy):
        both.commit(2, 4)
    assert copy.finished and pool.finished
    assert copy.state() == pool.state()


def test_what_a_worker_leaves_of_a_long_run_takes_no_room():
    pool = Pool(2, 1_000_000)
    pool.commit(1, 10)
    pool.give_up(1)
    assert len(str(pool.state())) < 500
    assert pool.take(0) == ((1, 10), 1_000_000)
    assert pool.take(0) == ((1, 11), 1_000_001)


EVENTS = ["work", "work", "work", "die", "come_back"]


class Crew:
    """Workers that do as the pool says, and how often each batch came into the model."""

    def __init__(self, workers, steps):
        self.pool = Pool(workers, steps)
        self.done = dict.fromkeys(((rank, place) for rank in range(workers) for place in range(steps)), 0)
        self.todo = {rank: [(rank, place) for place in range(steps)] for rank in range(workers)}
        self.clock = dict.fromkeys(range(workers), 0)

    def work(self, rank):
        """A living worker does its next batch, or asks for one."""
        if rank not in self.todo:
            return
        if self.todo[rank]:
            self.done[self.todo[rank].pop(0)] += 1
            self.clock[rank] += 1
            self.pool.commit(rank, self.clock[rank])
        elif (work := self.pool.take(rank)) is not None:
            batch, self.clock[rank] = work
            self.todo[rank].append(batch)

    def die(self, rank):
        self.todo.pop(rank, None)
        self.pool.give_up(rank)

    def come_back(self, rank):
        self.todo.setdefault(rank, [])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    workers=st.integers(1, 4),
    steps=st.integers(0, 4),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3))),
    saved=st.booleans(),
)
def test_every_batch_is_done_exactly_once_however_workers_come_and_go(workers, steps, events, saved):
    crew = Crew(workers, steps)
    for event, rank in events:
        getattr(crew, event)(rank % workers)
        if saved:
            state = crew.pool.state()
            crew.pool = Pool(workers, steps)
            crew.pool.load(state)
        assert crew.pool.finished == all(crew.done.values())
    crew.come_back(0)
    for _ in range(2 * workers * steps + 2):
        for rank in range(workers):
            crew.work(rank)
    assert crew.pool.finished
    assert set(crew.done.values()) <= {1}


def test_the_batches_of_a_smaller_crew_are_done():
    pool = Pool(workers=2, steps=5)
    pool.begin_at([3, 3])
    pool.give_up(1)
    assert pool.take(0) == ((1, 3), 5)  # of worker 1's share, from place 3 on
    assert pool.take(0) == ((1, 4), 6)
    pool.commit(0, 7)
    assert pool.finished
