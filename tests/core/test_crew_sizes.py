"""How a crew that grows is written down, and what is refused."""

from __future__ import annotations

import pytest

from shoal.core.crew_sizes import CrewSizes


def test_a_text_names_workers_and_the_step_from_which_they_train():
    crew = CrewSizes.parse(" 2@0, 4 @ 500,8@2000")
    assert crew.at == ((0, 2), (500, 4), (2000, 8))
    assert str(crew) == "2@0,4@500,8@2000"
    assert crew and crew.largest == 8
    assert [crew.first_step_of(rank) for rank in range(8)] == [0, 0, 500, 500, 2000, 2000, 2000, 2000]


def test_without_a_crew_workers_are_as_many_as_are_asked_for():
    assert not CrewSizes.parse(None)
    assert CrewSizes().size_of(3) == 3 and CrewSizes().size_of(None) == 1
    assert CrewSizes.parse("2@0,4@9").size_of(None) == CrewSizes.parse("2@0,4@9").size_of(4) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' in crew '' is not a number of workers and a step, as in 4@500"),
        ("4", "'4' in crew '4' is not a number of workers and a step, as in 4@500"),
        ("2@0,4x500", "'4x500' in crew"),
        ("2@10", "somebody has to begin; name the workers of step 0 first"),
        ("0@0", "a run needs at least 1 worker"),
        ("2@0,4@500,8@100", "name each step once, and in their order"),
        ("2@0,4@0", "name each step once, and in their order"),
        ("4@0,2@500", "a crew grows; name more workers each time"),
        ("4@0,4@500", "a crew grows; name more workers each time"),
    ],
)
def test_a_crew_that_cannot_be_is_refused(text, sentence):
    with pytest.raises(ValueError, match=r"crew") as refusal:
        CrewSizes.parse(text)
    assert sentence in str(refusal.value)


def test_workers_that_contradict_the_crew_are_refused():
    with pytest.raises(
        ValueError, match=r"workers=3 and crew='2@0,4@9', which ends with 4: leave workers out"
    ):
        CrewSizes.parse("2@0,4@9").size_of(3)
