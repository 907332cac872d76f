"""Where the successor of a worker goes on: after what is in the model, and not after what was only read."""

from shoal.engine.protocol import BatchesRead, Joined, Lost, Push, Report, Where
from shoal.engine.reached import MOST_FUTILE, UNKNOWN, Reached

WORKERS = 2


class Clock:
    seconds = 5.0

    def __call__(self):
        return self.seconds


def made(awaits=0.0, clock=None):
    reached = Reached(WORKERS, clock or Clock())
    reached.awaits_seconds = awaits
    return reached


def test_a_successor_goes_on_after_the_last_push_or_report():
    reached = made()
    assert reached.where(0) == (0, 0)
    reached.note(Push(src=0, clock=3))
    reached.note(Report(src=1, clock=5))
    assert [reached.where(rank) for rank in (0, 1)] == [(3, 3), (5, 5)]
    assert reached.pushed == {0: 3}


def test_batches_that_were_read_and_not_pushed_are_read_again():
    reached = made()
    reached.hear(BatchesRead(src=0, seq=4))
    reached.note(Push(src=0, clock=2))
    reached.hear(BatchesRead(src=0, seq=6))
    reached.lose(0)
    assert reached.where(0) == (2, 4)
    reached.note(Push(src=0, clock=3))  # from here on a step takes one batch
    assert reached.where(0) == (3, 3)


def test_a_lost_worker_is_awaited_for_a_while_and_until_its_successor_is_heard_of():
    reached = made()
    reached.lose(0)
    assert not reached.awaits_any  # where others do its batches
    clock = Clock()
    reached = made(60.0, clock)
    reached.lose(0)
    for m in (Lost(src=0), Joined(src=0), Push(src=1)):
        reached.hear(m)
        assert reached.awaits_any
    clock.seconds = 64.9
    assert reached.awaits_any
    clock.seconds = 65.0
    assert not reached.awaits_any
    clock.seconds = 6.0
    reached.hear(Where(src=0))
    assert not reached.awaits_any


def test_one_whose_place_nobody_knows_is_not_awaited():
    reached = made(60.0)
    reached.hear(BatchesRead(src=0, seq=UNKNOWN))
    reached.note(Push(src=0, clock=2))
    reached.lose(0)
    reached.hear(Where(src=0))
    assert reached.where(0) == (2, UNKNOWN)
    reached.lose(0)
    assert not reached.awaits_any


def test_a_server_that_is_lost_is_not_awaited_nor_undone():
    reached = made(60.0)
    reached.lose(WORKERS)
    assert not reached.awaits_any
    reached.end(set(range(WORKERS)) - {1})
    assert reached.undone == [1]


def test_one_that_has_joined_again_and_not_come_to_its_end_is_undone_until_it_has():
    """It was lost a moment before the others were done, and may be lost again."""
    reached = made(60.0)
    for _ in range(MOST_FUTILE + 1):
        reached.lose(1)
    reached.hear(Joined(src=1, incarnation=1))
    reached.end(set(range(WORKERS)) - {1})
    assert reached.undone == [1]
    reached.end({1})
    assert reached.undone == []


def test_one_that_is_lost_again_and_again_before_it_pushes_is_not_awaited():
    reached = made(60.0)
    for _ in range(2):
        for _ in range(MOST_FUTILE):
            reached.lose(0)
            assert reached.awaits_any
            reached.hear(Where(src=0))
        reached.note(Push(src=0, clock=1))
    for _ in range(MOST_FUTILE + 1):
        reached.hear(Where(src=0))
        reached.lose(0)
    assert not reached.awaits_any


def test_a_server_that_is_started_again_knows_it_all():
    reached, again = made(60.0), made(60.0)
    reached.note(Push(src=0, clock=2))
    reached.hear(BatchesRead(src=0, seq=9))
    reached.lose(1)
    again.load(reached.state())
    again.note(Push(src=0, clock=3))
    assert again.awaits_any
    assert again.where(0) == (3, 9)


def test_who_resumes_from_a_checkpoint_is_not_awaited_and_has_read_nothing():
    reached = made(60.0)
    reached.hear(BatchesRead(src=0, seq=9))
    reached.lose(1)
    reached.start_over()
    reached.note(Push(src=0, clock=3))
    assert not reached.awaits_any
    assert reached.where(0) == (3, 3)


def test_an_older_checkpoint_knows_the_pushes_alone():
    reached = made()
    reached.load({"pushed": {"0": 2}})
    assert reached.pushed == {0: 2}
    assert reached.where(0) == (2, 2)
