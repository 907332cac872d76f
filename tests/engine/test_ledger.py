"""The ledger: a request that comes twice is done once."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.transport import Message
from shoal.engine.ledger import WINDOW, Ledger
from shoal.engine.protocol import Ack, Push


def push(seq, src=0, incarnation=0):
    return Push(src=src, seq=seq, incarnation=incarnation)


def ack(seq, version=0):
    return Ack(seq=seq, version=version)


def take(ledger, m, answer=None):
    """What a server does with a request: the answer, and whether it acted on it."""
    known = ledger.answer_to(m)
    if known is not None:
        return known, False
    ledger.record(m, answer or ack(m.seq))
    return ledger.answer_to(m), True


def test_a_request_is_new_once():
    ledger = Ledger()
    assert ledger.answer_to(push(1)) is None
    ledger.record(push(1), ack(1, version=7))
    again = ledger.answer_to(push(1))
    assert (again.tag, again.seq, again.version) == ("ack", 1, 7)


def test_a_request_that_was_not_answered_is_still_new():
    ledger = Ledger()
    assert ledger.answer_to(push(1)) is None
    assert ledger.answer_to(push(1)) is None


def test_clients_number_their_requests_by_themselves():
    ledger = Ledger()
    take(ledger, push(1, src=0))
    assert ledger.answer_to(push(1, src=1)) is None


def test_requests_may_come_out_of_order():
    ledger = Ledger()
    assert take(ledger, push(3))[1]
    assert take(ledger, push(2))[1]
    assert not take(ledger, push(3))[1]
    assert not take(ledger, push(2))[1]


def test_the_first_answer_is_given_again_with_all_that_was_in_it():
    ledger = Ledger()
    work = Message("work", (torch.tensor([2, 5, 7]),), seq=4)
    ledger.record(push(4), work)
    assert ledger.answer_to(push(4)).body.tolist() == [2, 5, 7]


def test_what_was_answered_long_ago_is_forgotten_but_not_done_again():
    ledger = Ledger()
    for seq in range(1, 2 * WINDOW + 1):
        assert take(ledger, push(seq))[1]
    oldest = ledger.answer_to(push(1))
    assert (oldest.tag, oldest.seq) == ("ack", 1)
    assert len(ledger.state()["0"]["answers"]) == WINDOW


def test_who_was_given_up_on_is_told_so():
    ledger = Ledger()
    take(ledger, push(1))
    ledger.fence(0)
    for seq in (1, 2):  # also what was answered before: its work has gone to others
        answer = ledger.answer_to(push(seq))
        assert (answer.tag, answer.seq) == ("fenced", seq)


def test_one_that_was_given_up_on_before_its_first_word_is_told_so_too():
    ledger = Ledger()
    ledger.fence(3)
    assert ledger.answer_to(push(1, src=3)).tag == "fenced"
    assert ledger.answer_to(push(1, src=2)) is None


def test_the_next_incarnation_begins_anew():
    ledger = Ledger()
    take(ledger, push(1))
    ledger.fence(0)
    assert take(ledger, push(1, incarnation=1))[1]
    assert not take(ledger, push(1, incarnation=1))[1]
    assert ledger.answer_to(push(2, incarnation=0)).tag == "fenced"  # it was on the way when its sender died


def test_each_loss_fences_one_incarnation_more():
    ledger = Ledger()
    ledger.fence(0)
    assert take(ledger, push(1, incarnation=1))[1]
    ledger.fence(0)
    assert ledger.answer_to(push(2, incarnation=1)).tag == "fenced"
    assert ledger.answer_to(push(1, incarnation=2)) is None


@pytest.mark.parametrize("fenced", [False, True])
def test_a_ledger_that_was_saved_answers_as_it_did(fenced):
    ledger = Ledger()
    for seq in range(1, WINDOW + 6):
        take(ledger, push(seq), ack(seq, version=seq))
    ledger.record(push(1, src=2), Message("work", (torch.tensor([2, 5, 7]),), seq=1))
    if fenced:
        ledger.fence(2)
    copy = Ledger()
    copy.load(json.loads(json.dumps(ledger.state())))
    assert copy.state() == ledger.state()
    for m in (push(1), push(WINDOW), push(WINDOW + 6), push(1, src=2), push(2, src=2), push(1, src=9)):
        here, there = ledger.answer_to(m), copy.answer_to(m)
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            assert (here.tag, here.seq, here.version) == (there.tag, there.seq, there.version)
            assert [p.tolist() for p in here.parts] == [p.tolist() for p in there.parts]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    under_way=st.integers(1, 8),
    picks=st.lists(st.integers(0, 7), min_size=1, max_size=300),
    saved=st.booleans(),
)
def test_every_request_is_done_exactly_once_in_whatever_order_and_however_often_it_comes(
    under_way, picks, saved
):
    # a client has a few requests under way and repeats any of them until it is answered, and some after that
    ledger, done, waiting = Ledger(), [], list(range(1, under_way + 1))
    for pick in picks:
        seq = waiting[pick % len(waiting)]
        _, acted = take(ledger, push(seq))
        if acted:
            done.append(seq)
        elif pick % 2:  # the client has heard, and asks the next question
            waiting[waiting.index(seq)] = max(waiting) + 1
        if saved:
            state = ledger.state()
            ledger = Ledger()
            ledger.load(state)
    assert len(done) == len(set(done))
    for seq in waiting:
        take(ledger, push(seq))
    assert all(ledger.answer_to(push(seq)) is not None for seq in range(1, max(waiting) + 1))
