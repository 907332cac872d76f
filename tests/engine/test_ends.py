"""Ends: who has come to the end, told apart from who has joined again since, and from who says goodbye."""

from shoal.engine.elastic_messages import Finished, Leaves
from shoal.engine.ends import Ends
from shoal.launch.drive import drive


def finished(rank, rounds, epoch):
    return Finished(seq=rounds, version=epoch, src=rank)


def test_who_has_ended_is_known_with_the_rounds_that_it_completed():
    ends = Ends()
    assert ends.note(finished(1, rounds=7, epoch=2))
    assert ends.rounds == {1: 7}


def test_who_was_let_in_again_has_not_ended():
    ends = Ends()
    ends.note(finished(1, rounds=7, epoch=2))
    ends.note(finished(2, rounds=7, epoch=2))
    ends.let_in([(1, 3)])
    assert ends.rounds == {2: 7}


def test_late_word_of_an_end_before_it_was_let_in_counts_for_nothing():
    ends = Ends()
    ends.let_in([(1, 3)])
    assert not ends.note(finished(1, rounds=7, epoch=2))
    assert ends.note(finished(1, rounds=9, epoch=3))
    assert ends.rounds == {1: 9}


def test_a_goodbye_is_of_one_incarnation():
    ends = Ends()
    drive(ends.note_goodbye(Leaves(src=1, incarnation=4)))
    assert ends.goodbyes == {1: 4}
    assert not ends.rounds
