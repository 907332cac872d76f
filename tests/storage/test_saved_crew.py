"""Who wrote a checkpoint, as all of them say."""

from dataclasses import replace

import pytest

from shoal.storage.saved_crew import SavedCrew

TWO = SavedCrew(workers=3, members=(0, 1), servers=0, is_open=False, rounds=3)
ALL = replace(TWO, members=(0, 1, 2))
LATER = replace(ALL, rounds=4)


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        ({0: TWO, 1: TWO}, TWO),
        ({0: TWO}, TWO),  # the files of the other are elsewhere
        ({0: TWO, 1: TWO, 2: LATER}, TWO),  # one joined after the average
        ({0: LATER, 1: TWO, 2: LATER}, None),  # worker 1 was killed before it saved again
        ({0: LATER, 1: LATER, 2: ALL}, None),
        ({0: LATER, 1: LATER, 2: LATER}, LATER),
        (
            {0: LATER, 1: replace(TWO, members=(1, 2)), 2: replace(TWO, members=(1, 2))},
            replace(TWO, members=(1, 2)),
        ),
        ({0: replace(ALL, is_open=True), 1: replace(LATER, is_open=True)}, replace(ALL, is_open=True)),
    ],
)
def test_the_crew_is_the_one_whose_members_say_the_same(told, agreed):
    assert SavedCrew.agreed(told) == agreed


def test_users_loops_at_different_places_in_their_data_cannot_be_dealt_to_others():
    here = {"number": 1, "taken": 24, "done": 2, "again": [], "is_dealt": True}
    crew = SavedCrew(3, (0, 1, 2), 0, False, loop=here)
    behind = replace(crew, loop={**here, "done": 1})
    own = replace(crew, loop={**here, "is_dealt": False})
    assert SavedCrew.why_undealt([crew, crew, None]) == ""
    assert "different places" in SavedCrew.why_undealt([crew, behind])
    assert "shoal.shard" in SavedCrew.why_undealt([own, own])
    assert SavedCrew.why_undealt([replace(crew, loop=None)]) == ""
