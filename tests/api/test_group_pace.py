"""The processes of a group end a step together, and answer other workers until they have."""

from types import SimpleNamespace

import pytest

from shoal.api import group_pace
from shoal.api.group_pace import GroupPace


class Barrier:
    """Completed when this process has answered a worker without which the rest of its group cannot come."""

    def __init__(self, rounds):
        self._rounds = rounds
        self.was_waited_for = False

    def is_completed(self):
        return self._rounds.answered

    def wait(self):
        self.was_waited_for = True


class Rounds:
    """Answers one question when it is asked to answer."""

    answered = False

    def __init__(self, answers):
        self.answers = answers

    async def answer_until(self, is_done):
        while not is_done():
            self.answered = True


@pytest.fixture
def barriers(monkeypatch):
    made = []

    def barrier(group, async_op):
        assert async_op
        made.append(Barrier(group))
        return made[-1]

    monkeypatch.setattr(group_pace.dist, "barrier", barrier)
    return made


def test_it_answers_while_it_waits_for_its_group_and_agrees_after_that(barriers):
    rounds, agreed = Rounds({"ask": None}), []
    replica = SimpleNamespace(agree=lambda: agreed.append(barriers[0].was_waited_for))
    GroupPace(SimpleNamespace(rounds=rounds), replica, [rounds]).end_step()
    assert rounds.answered and agreed == [True]


@pytest.mark.parametrize(("answers", "groups"), [({}, 1), ({"ask": None}, 0)])
def test_without_a_group_or_without_questions_nobody_waits(answers, groups, barriers):
    rounds, agreed = Rounds(answers), []
    replica = SimpleNamespace(agree=lambda: agreed.append(True))
    GroupPace(SimpleNamespace(rounds=rounds), replica, [rounds] * groups).end_step()
    assert (barriers, agreed) == ([], [True])
