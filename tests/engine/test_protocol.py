"""Messages take the type that their tag says, in place."""

from dataclasses import replace

import pytest

from shoal.core.transport import Message
from shoal.engine import protocol
from shoal.engine.protocol import Answer, Notice, Push, Request, typed


def test_a_message_of_ours_takes_its_type_in_place():
    m = Message("push", count=3.0)
    assert typed(m) is m
    assert isinstance(m, Push) and isinstance(m, Request)
    assert type(replace(m, src=1)) is Push


def test_a_message_of_an_algorithm_stays_what_it_is():
    assert type(typed(Message("swap"))) is Message


@pytest.mark.parametrize("kind", [Request, Answer, Notice])
def test_every_request_answer_and_notice_is_known_by_its_tag(kind):
    kinds = [
        k for k in vars(protocol).values() if isinstance(k, type) and issubclass(k, kind) and k is not kind
    ]
    assert len(kinds) >= 3
    assert all(type(typed(Message(k().tag))) is k for k in kinds)
