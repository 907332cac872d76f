"""When a server saves with its workers: all that are at work have saved before the same step."""

from shoal.engine.savers import Savers


def nobody(rank):
    return False


def test_a_step_is_complete_when_all_have_saved_before_it():
    savers = Savers(2)
    savers.note(0, 0, 10)
    assert savers.complete(nobody) is None
    savers.note(1, 0, 10)
    assert savers.complete(nobody) == 10
    assert savers.members == {0: 0, 1: 0}


def test_nobody_waits_for_one_that_has_gone_or_has_nothing_to_do():
    savers = Savers(3)
    savers.note(0, 0, 10)
    assert savers.complete(lambda rank: rank == 1) is None
    assert savers.complete(lambda rank: rank > 0) == 10
    assert savers.members == {0: 0}


def test_what_one_saved_before_it_died_is_in_no_later_step():
    savers = Savers(2)
    savers.note(1, 0, 10)
    savers.forget(1)
    assert savers.complete(lambda rank: True) is None
    savers.note(0, 0, 10)
    assert savers.complete(lambda rank: rank == 1) == 10
    assert savers.members == {0: 0}


def test_a_successor_that_began_after_a_step_is_no_member_of_it_but_of_the_next():
    savers = Savers(2)
    savers.note(0, 0, 10)
    savers.note_clock(1, 9)
    assert savers.complete(nobody) is None
    savers.note_clock(1, 12)
    assert savers.complete(nobody) == 10
    savers.note(0, 0, 20)
    savers.note(1, 1, 20)
    assert savers.complete(nobody) == 20
    assert savers.members == {0: 0, 1: 1}


def test_the_newest_of_several_complete_steps_counts():
    savers = Savers(1)
    for step in (10, 20):
        savers.note(0, 0, step)
    assert savers.complete(nobody) == 20
    assert savers.complete(nobody) is None
