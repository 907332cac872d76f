"""The methods of search as pure objects: identities of algorithm cards 25 and 43, worked out by hand."""

from __future__ import annotations

import copy
import math
from collections import Counter
from random import Random

import pytest
from asking import LR, by_trial, drive

from shoal.search import METHODS
from shoal.search.evolution import Evolution, winner
from shoal.search.hierarchical_evolution import HierarchicalEvolution
from shoal.search.population import PBT
from shoal.search.random_search import RandomSearch
from shoal.search.searcher import FAILED, SearchTrial
from shoal.search.space import Space
from shoal.search.successive_halving import ASHA
from shoal.search.swarm import PSO, move

OWN = [word for word in METHODS if word != "optuna"]
SPACES = {"hierarchical": Space({"architecture": "cells:mutations=5", "lr": (0.1, 1.0)})}
SMALL = {
    "random": "random:length=2",
    "asha": "asha:longest=4,reduction=2",
    "pbt": "pbt:population=4",
    "evolution": "evolution:population=4,sample=2,length=2",
    "hierarchical": "hierarchical:population=4,length=2",
    "pso": "pso:particles=3,length=2",
}


def searcher(word: str, epochs: int = 40, seed: int = 3):
    return METHODS.read(SMALL[word]).searcher(SPACES.get(word, LR), epochs, seed)


def noisy(piece) -> float:
    """A score that depends on the values, the epochs and nothing else."""
    return Random(f"{piece.values}{piece.end}").random()


# -- what every method answers -------------------------------------------------------------------------


@pytest.mark.parametrize("word", OWN)
def test_a_search_stays_within_its_budget_and_ends(word):
    for epochs in (1, 7, 40):
        found = searcher(word, epochs)
        pieces = drive(found, noisy, at_once=3)
        assert sum(piece.end - piece.begin for piece in pieces) == found.spent <= epochs
        assert not found.running and not found.has_more


@pytest.mark.parametrize("word", OWN)
def test_the_same_events_give_the_same_state(word):
    first, second = searcher(word), searcher(word)
    drive(first, noisy, at_once=2)
    drive(second, noisy, at_once=2)
    assert first.state() == second.state()
    other = searcher(word, seed=4)
    drive(other, noisy, at_once=2)
    assert other.state() != first.state()


@pytest.mark.parametrize("word", OWN)
def test_asking_in_vain_changes_nothing(word):
    found = searcher(word)
    while found.suggest() is not None:
        pass
    before = copy.deepcopy(found.state())
    assert found.suggest() is None and not found.has_more
    assert found.state() == before


@pytest.mark.parametrize("word", OWN)
def test_the_best_never_worsens_and_is_the_first_of_equals(word):
    found, best = searcher(word), []
    drive(found, lambda piece: [noisy(piece), best.append(found.best)][0])
    scores = [-math.inf if b is None else b[0] for b in best]
    assert scores == sorted(scores)
    tied = searcher(word)
    drive(tied, lambda piece: 1.0)
    assert tied.best == (1.0, 0)


@pytest.mark.parametrize("word", OWN)
def test_a_trial_that_fails_is_never_the_best_nor_an_origin(word):
    found = searcher(word)
    pieces = drive(found, lambda piece: math.nan if piece.number % 3 == 0 else noisy(piece))
    failed = {piece.number for piece in pieces if piece.number % 3 == 0}
    assert found.best is not None and found.best[1] not in failed
    assert not failed & {piece.origin for piece in pieces}


def test_a_report_that_nobody_asked_for_is_refused():
    found = searcher("random")
    found.suggest()
    with pytest.raises(ValueError, match="was not asked to reach 7 epochs"):
        found.report(0, 1.0, 7)
    found.report(0, 1.0, 2)
    with pytest.raises(ValueError, match="was not asked"):
        found.report(0, 1.0, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pbt:population=0", "population=0 must be at least 1"),
        ("pbt:quantile=0.6", "at most 0.5"),
        ("asha:longest=2,first=4", "below first=4"),
        ("asha:reduction=1", "reduction=1 must be at least 2"),
        ("pso:fastest=0", "above 0"),
        ("hierarchical:tournament=2", "at most 1"),
        ("pbd", "unknown method 'pbd'. Did you mean 'pbt'"),
    ],
)
def test_wrong_options_are_refused(text, why):
    with pytest.raises(ValueError, match=why):
        METHODS.read(text)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("pbt:population=4,interval=3", 16),
        ("evolution:population=4,length=3", 15),
        ("hierarchical:population=4,length=3", 15),
        ("pso:particles=4,length=3", 15),
        ("random:length=3", 1),
        ("asha", 1),
    ],
)
def test_a_budget_that_ends_with_the_first_generation_is_refused(text, least):
    method = METHODS.read(text)
    method.check_budget(least)
    with pytest.raises(ValueError, match=f"ends with the first generation .*; take {least} or more"):
        method.check_budget(least - 1)


@pytest.mark.parametrize("word", ["pbt", "evolution", "hierarchical", "pso"])
def test_by_default_scores_decide_most_of_a_hundred_epochs(word):
    assert METHODS.make(word).least <= 25


# -- population-based training -------------------------------------------------------------------------


def test_of_four_members_the_worst_copies_the_best_and_the_others_change_nothing():
    found = PBT(population=4, quantile=0.25, resample=0.0, synchronous=True).searcher(LR, 8, 0)
    first = [found.suggest() for _ in range(4)]
    assert found.suggest() is None  # all wait for each other
    for piece, score in zip(first, (1.0, 2.0, 3.0, 4.0), strict=True):
        found.report(piece.trial, score, 1)
    second = [found.suggest() for _ in range(4)]
    assert [piece.origin for piece in second] == [3, 1, 2, 3]  # ceil(0.25 * 4) = 1 worst, 1 best
    assert [piece.values for piece in second[1:]] == [piece.values for piece in first[1:]]
    donor, loser = first[3].values, second[0].values
    assert loser["lr"] in (min(1.0, donor["lr"] * 1.2), donor["lr"] * 0.8)
    assert [piece.trial for piece in second] == [0, 1, 2, 3]  # the population has kept its size


def test_a_quantile_of_nothing_is_random_search_with_fixed_values():
    found = PBT(population=5, quantile=0.0).searcher(LR, 20, 7)
    drive(found, noisy)
    random = RandomSearch(length=4).searcher(LR, 20, 7)
    drive(random, noisy)
    assert [trial.values for trial in found.trials] == [trial.values for trial in random.trials]
    assert [trial.epochs for trial in found.trials] == [4] * 5


def test_an_exploit_takes_the_donors_epochs_and_waits_a_whole_interval():
    method = PBT(population=4, quantile=0.25, interval=3, synchronous=True)
    found = method.searcher(LR, 4 * 12, 0)
    pieces = drive(found, by_trial([1.0, 2.0, 3.0, 4.0]))
    exploits = [p for p in pieces if p.origin is not None and found.pieces[p.origin].trial != p.trial]
    assert [(p.trial, p.begin) for p in exploits] == [(0, 3), (0, 6), (0, 9)]


@pytest.mark.parametrize("at_once", [1, 3])
def test_asynchronous_members_copy_only_from_the_best_quantile_of_that_moment(at_once):
    method = PBT(population=8, quantile=0.25, interval=1)
    found = method.searcher(LR, 80, 5)
    heard: list = []

    def score(piece):
        heard.append(piece)
        return noisy(piece)

    drive(found, score, at_once)
    assert len(found.trials) == 8
    assert Counter(piece.trial for piece in heard) == dict.fromkeys(range(8), 10)  # equally long
    donors = [p for p in heard if p.origin is not None and found.pieces[p.origin].trial != p.trial]
    assert donors  # it did exploit
    assert all(piece.begin == found.pieces[piece.origin].end for piece in donors)


def test_two_members_are_the_fewest_that_copy():
    for population, copies in ((1, 0), (2, 1)):
        found = PBT(population=population, quantile=0.5, synchronous=True).searcher(LR, 2 * population, 0)
        pieces = drive(found, by_trial([1.0, 2.0]))
        assert sum(p.origin is not None and found.pieces[p.origin].trial != p.trial for p in pieces) == copies


def test_a_member_that_diverged_takes_over_from_a_living_one_or_starts_anew():
    found = PBT(population=4, quantile=0.25, synchronous=True).searcher(LR, 8, 0)
    for score in (FAILED, FAILED, 1.0, 2.0):
        piece = found.suggest()
        found.report(piece.trial, score, 1)
    assert [found.suggest().origin for _ in range(4)] == [3, 3, 2, 3]
    alone = PBT(population=1).searcher(LR, 2, 0)
    first = alone.suggest()
    alone.report(0, FAILED, 1)
    again = alone.suggest()
    assert (again.origin, again.begin) == (None, 0) and again.values != first.values


def test_checkpoints_of_every_member_are_kept():
    found = PBT(population=4).searcher(LR, 12, 0)
    drive(found, noisy)
    assert {trial.piece for trial in found.trials} <= found.needed()


# -- successive halving --------------------------------------------------------------------------------


def test_rungs_grow_by_the_reduction():
    assert ASHA(first=1, longest=16, reduction=4).rungs == [1, 4, 16]
    assert ASHA(first=2, longest=17, reduction=3).rungs == [2, 6]


def test_one_rung_is_random_search():
    found = ASHA(first=3, longest=3, reduction=4).searcher(LR, 12, 1)
    drive(found, noisy)
    random = RandomSearch(length=3).searcher(LR, 12, 1)
    drive(random, noisy)
    assert found.state() == {**random.state(), "rungs": found.state()["rungs"]}


def test_of_scores_that_fall_only_the_first_of_each_half_goes_on():
    found = ASHA(first=1, longest=4, reduction=2).searcher(LR, 9, 0)
    pieces = drive(found, lambda piece: -float(piece.trial))
    told = [(piece.trial, piece.begin, piece.end) for piece in pieces]
    # two results: the better goes on; four: the second best; then rung 1 has two, and the better goes on
    assert told == [(0, 0, 1), (1, 0, 1), (0, 1, 2), (2, 0, 1), (3, 0, 1), (1, 1, 2), (0, 2, 4), (4, 0, 1)]


def test_whoever_is_promoted_is_among_the_best_of_its_rung_at_that_moment():
    found = ASHA(first=1, longest=16, reduction=4).searcher(LR, 200, 2)
    scores: dict[tuple[int, int], float] = {}
    while (piece := found.suggest()) is not None:
        if piece.begin:
            rung = sorted((s for (_, end), s in scores.items() if end == piece.begin), reverse=True)
            assert scores[piece.trial, piece.begin] >= rung[len(rung) // 4 - 1]
        scores[piece.trial, piece.end] = noisy(piece)
        found.report(piece.trial, scores[piece.trial, piece.end], piece.end)
    ends = Counter(end for _, end in scores)
    assert ends[1] > ends[4] > ends[16] > 0


def test_a_checkpoint_that_may_be_promoted_is_kept():
    found = ASHA(first=1, longest=4, reduction=2).searcher(LR, 5, 0)
    pieces = drive(found, noisy)
    assert {found.trials[p.trial].piece for p in pieces if found.trials[p.trial].epochs < 4} <= found.needed()


# -- evolution -----------------------------------------------------------------------------------------


def test_the_winner_of_a_tournament_is_the_best_and_the_first_drawn_of_equals():
    a, b, c = (SearchTrial(n, {}, score=s) for n, s in enumerate((1.0, 3.0, 3.0)))
    assert winner([a, b, c]) is b
    assert winner([a, c, b]) is c
    assert winner([a]) is a
    assert winner([SearchTrial(9, {}, score=FAILED), a]) is a


def test_every_model_lives_for_exactly_as_many_births_as_the_queue_is_long():
    found = Evolution(population=5, sample=2, length=1).searcher(LR, 30, 0)
    lived: Counter = Counter()

    def score(piece):
        lived.update(found.state()["queue"])
        return 100.0 if piece.trial == 0 else noisy(piece)  # the best dies, too

    drive(found, score)
    queue = found.state()["queue"]
    assert queue == [25, 26, 27, 28, 29]
    assert len(found.trials) == 30  # including the first five
    assert all(lived[trial] == 5 for trial in range(25) if trial >= 4)
    assert found.best[0] == 100.0 and 0 not in queue  # lost to the population, not to the search


def test_a_child_differs_from_its_parent_by_one_mutation():
    found = Evolution(population=4, sample=2, length=1).searcher(LR, 40, 0)
    drive(found, noisy)
    for trial in found.trials[4:]:
        parent = found.trials[trial.parent]
        assert sum(trial.values[name] != parent.values[name] for name in LR) == 1


def test_a_sample_of_the_whole_queue_many_times_over_is_greedy():
    found = Evolution(population=4, sample=400, length=1).searcher(LR, 30, 0)
    alive: dict[int, list[int]] = {}

    def score(piece):
        alive[piece.trial] = found.state()["queue"]
        return noisy(piece)

    drive(found, score)
    for trial in found.trials[4:]:
        best = max(alive[trial.number], key=lambda n: found.trials[n].score)
        assert trial.parent == best


def test_evolution_fills_strings_of_bits_with_ones():
    """The toy problem of the paper's notebook, shorter: noisy counts of ones, one bit flipped in a child."""
    space = Space({f"bit{k}": [0, 1] for k in range(30)})
    found = Evolution(population=20, sample=8, length=1).searcher(space, 600, 0)
    noise = Random(0)
    drive(found, lambda piece: sum(piece.values.values()) / 30 + noise.gauss(0, 0.01))
    random = RandomSearch(length=1).searcher(space, 600, 0)
    drive(random, lambda piece: sum(piece.values.values()) / 30)
    assert sum(found.pieces[found.best[1]].values.values()) >= 29
    assert sum(random.pieces[random.best[1]].values.values()) <= 26


def test_hierarchical_evolution_mutates_the_winner_and_removes_nobody():
    found = HierarchicalEvolution(population=4, tournament=1.0, length=1).searcher(
        SPACES["hierarchical"], 20, 0
    )
    drive(found, noisy)
    for trial in found.trials[4:]:
        before = found.trials[: trial.number]
        assert trial.parent == max(before, key=lambda other: other.score).number  # a tournament of all
    two = HierarchicalEvolution(population=4, tournament=0.01, length=1).searcher(
        SPACES["hierarchical"], 9, 0
    )
    drive(two, noisy)
    assert {len(two._tournament(two.trials[:count])) for count in (2, 9)} == {2}
    with pytest.raises(ValueError, match="evolves cells of motifs"):
        HierarchicalEvolution().check(LR)


# -- particle swarm ------------------------------------------------------------------------------------


def test_a_particle_moves_by_inertia_and_two_pulls():
    method = PSO(inertia=0.5, own=1.0, swarm=2.0, fastest=1.0)
    draws = iter([0.5, 0.25])
    x, v = move(method, [0.5], [0.2], [0.7], [0.3], lambda: next(draws))
    # v = 0.5 * 0.2 + 1 * 0.5 * (0.7 - 0.5) + 2 * 0.25 * (0.3 - 0.5) = 0.1 + 0.1 - 0.1
    assert v == pytest.approx([0.1]) and x == pytest.approx([0.6])


def test_speed_and_place_are_clamped_and_a_wall_stops_the_particle():
    method = PSO(inertia=1.0, own=0.0, swarm=0.0, fastest=0.5)
    assert move(method, [0.1], [0.9], [0.0], [0.0], lambda: 1.0) == ([0.6], [0.5])
    assert move(method, [0.8], [0.4], [0.0], [0.0], lambda: 1.0) == ([1.0], [0.0])


def test_without_pulls_and_with_full_inertia_particles_fly_straight():
    space = Space({"a": (0.0, 1.0), "b": (0.0, 1.0)})
    found = PSO(particles=3, inertia=1.0, own=0.0, swarm=0.0, length=1).searcher(space, 9, 4)
    drive(found, noisy)
    for particle in range(3):
        places = [tuple(found.trials[particle + 3 * move].values.values()) for move in range(3)]
        for axis in range(2):
            start, middle, end = (place[axis] for place in places)
            if 0.0 < end < 1.0 and 0.0 < middle < 1.0:
                assert end - middle == pytest.approx(middle - start)


def test_the_best_place_of_the_swarm_never_worsens():
    found = PSO(particles=4, length=1).searcher(LR, 60, 0)
    seen = []
    drive(found, lambda piece: [noisy(piece), seen.append(found.state()["swarm"][0])][0])
    assert seen == sorted(seen)
    assert found.state()["swarm"][0] == found.best[0]


def test_a_swarm_finds_the_lowest_point_of_a_bowl():
    space = Space({"a": (0.0, 1.0), "b": "log 1e-4..1.0", "c": "1..100"})

    def bowl(piece):
        a, b, c = piece.values.values()
        return -((a - 0.3) ** 2) - ((math.log10(b) + 2) / 4) ** 2 - ((c - 70) / 100) ** 2

    found = PSO(particles=10, length=1).searcher(space, 300, 0)
    drive(found, bowl, at_once=4)
    random = RandomSearch(length=1).searcher(space, 300, 0)
    drive(random, bowl)
    assert found.best[0] > -1e-3 and found.best[0] > random.best[0]


def test_a_swarm_refuses_architectures():
    with pytest.raises(ValueError, match="moves between numbers"):
        PSO().check(Space({"architecture": "layers"}))
