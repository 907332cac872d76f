"""Places of a run that workers from elsewhere take: who gets one, and who is told why not."""

import json

import pytest

from shoal.core.errors import ShoalError
from shoal.launch.open_places import OpenPlaces, vacate
from shoal.launch.versions import version


def opened(folder, ranks=(2, 3), **settings):
    told = []
    places = OpenPlaces(
        ranks, folder, lambda: {"plan": {}, **settings}, lambda rank, e: told.append((rank, e))
    )
    return places, told


def ask(places, present=frozenset(), **words):
    asked = json.dumps({"version": version(), **words}).encode()
    number, granted = places.grant(asked, "ipv4:10.0.0.2:4711", present)
    return number, json.loads(granted)


def test_each_gets_a_place_of_its_own_as_incarnation_1(tmp_path):
    places, told = opened(tmp_path)
    (_, first), (_, second) = ask(places), ask(places)
    assert [(g["rank"], g["incarnation"]) for g in (first, second)] == [(2, 1), (3, 1)]
    assert [(rank, event["event"]) for rank, event in told] == [(2, "came"), (3, "came")]


def test_the_next_in_a_place_is_the_next_incarnation(tmp_path):
    places, told = opened(tmp_path, [2])
    places.free(ask(places)[0])
    assert ask(places)[1]["incarnation"] == 2
    assert [event["event"] for _, event in told] == ["came", "gone", "came"]


def test_a_restarted_keeper_grants_no_incarnation_twice_and_gives_who_was_there_its_place_back(tmp_path):
    ask(opened(tmp_path, [2])[0])
    successor, _ = opened(tmp_path, [2])
    assert successor.taken == {2}
    number, granted = ask(successor, rank=2, incarnation=1)
    assert (granted["rank"], granted["incarnation"]) == (2, 1)
    successor.free(number)
    assert ask(successor)[1]["incarnation"] == 2


def test_who_claims_a_place_that_another_has_had_since_gets_a_free_one(tmp_path):
    places, _ = opened(tmp_path)
    places.free(ask(places)[0])
    ask(places)
    assert ask(places, rank=2, incarnation=1)[1]["rank"] == 3


def test_the_place_of_a_worker_that_is_not_started_again_is_open_when_the_others_are_taken(tmp_path):
    places, _ = opened(tmp_path, [2])
    vacate(tmp_path, 0, incarnation=3)
    granted = [ask(places)[1] for _ in range(2)]
    assert [(g["rank"], g["incarnation"]) for g in granted] == [(2, 1), (0, 4)]
    assert refusal(places) == "all its places are taken"


def refusal(places, present=frozenset(), **words):
    with pytest.raises(ShoalError) as refused:
        ask(places, present, **words)
    return str(refused.value)


def test_each_refusal_is_a_sentence(tmp_path):
    places, _ = opened(tmp_path, [2])
    assert refusal(places, version="0.0, code 1234") == (
        f"it has another Shoal ({version()}) than this one (0.0, code 1234); install the same one"
    )
    assert refusal(places, present={2}) == "all its places are taken"
    ask(places)
    assert refusal(places) == "all its places are taken"
    places.is_over = lambda: True
    assert refusal(places) == "the run is about to end"


@pytest.mark.parametrize("words", [b"", b"[1]", b"\xff", b'"x"'])
def test_what_is_not_a_json_object_is_refused(tmp_path, words):
    places, _ = opened(tmp_path)
    with pytest.raises(ShoalError, match="not a JSON object"):
        places.grant(words, "ipv4:10.0.0.2:4711", set())


def test_events_of_a_worker_are_passed_on_and_others_refused(tmp_path):
    places, told = opened(tmp_path)
    number, _ = ask(places)
    places.hear(number, b'{"event": "progress", "step": 5}')
    assert told[-1] == (2, {"event": "progress", "step": 5})
    with pytest.raises(ShoalError, match="no event of a worker"):
        places.hear(number, b'{"event": "failed"}')
