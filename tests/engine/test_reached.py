"""Where the successor of a worker goes on: after what is in the model, and not after what was only read."""

from shoal.engine.protocol import BatchesRead, Push, Report
from shoal.engine.reached import MOST_FUTILE, Reached


def away(seconds):
    return lambda rank: seconds


def test_a_successor_goes_on_after_the_last_push_or_report():
    reached = Reached()
    assert reached.come_back(0) == (0, 0)
    reached.note(Push(src=0, clock=3))
    reached.note(Report(src=1, clock=5))
    assert [reached.come_back(rank) for rank in (0, 1)] == [(3, 3), (5, 5)]
    assert reached.pushed == {0: 3}


def test_batches_that_were_read_and_not_pushed_are_read_again():
    reached = Reached()
    reached.hear(BatchesRead(src=0, seq=4))
    reached.note(Push(src=0, clock=2))
    reached.hear(BatchesRead(src=0, seq=6))
    reached.lose(0)
    assert reached.come_back(0) == (2, 4)
    reached.note(Push(src=0, clock=3))  # from here on a step takes one batch
    assert reached.come_back(0) == (3, 3)


def test_a_lost_worker_is_awaited_for_a_while_and_until_its_successor_comes():
    reached = Reached()
    reached.lose(0)
    assert not reached.awaits_any(away(0.0))  # where others do its batches
    reached.awaits_seconds = 60.0
    assert reached.awaits_any(away(59.0))
    assert not reached.awaits_any(away(60.0))
    reached.come_back(0)
    assert not reached.awaits_any(away(0.0))


def test_one_that_is_lost_again_and_again_before_it_pushes_is_not_awaited():
    reached = Reached()
    reached.awaits_seconds = 60.0
    for _ in range(2):
        for _ in range(MOST_FUTILE):
            reached.lose(0)
            assert reached.awaits_any(away(0.0))
            reached.come_back(0)
        reached.note(Push(src=0, clock=1))
    for _ in range(MOST_FUTILE + 1):
        reached.come_back(0)
        reached.lose(0)
    assert not reached.awaits_any(away(0.0))


def test_a_server_that_is_started_again_knows_it_all():
    reached, again = Reached(), Reached()
    reached.note(Push(src=0, clock=2))
    reached.hear(BatchesRead(src=0, seq=9))
    reached.lose(1)
    again.load(reached.state())
    again.note(Push(src=0, clock=3))
    again.awaits_seconds = 60.0
    assert again.awaits_any(away(0.0))
    assert again.come_back(0) == (3, 9)


def test_an_older_checkpoint_knows_the_pushes_alone():
    reached = Reached()
    reached.load({"pushed": {"0": 2}})
    assert reached.pushed == {0: 2}
    assert reached.come_back(0) == (2, 2)
