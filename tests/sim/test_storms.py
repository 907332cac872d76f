"""Storms, and mutants of the protocol that they must catch; `make soak` has two thousand. See storm.py."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, Mutant
from storm import Run, Storm, command, verdict

from sampling import mostly_soak

SEEDS, MEMORY_SEEDS, CHUNK = 2000, 600, 25
MOST = 1000  # seeds for each mutant; it is done with the first that catches it
SHOWN = 10


def weather(seeds: range, keeps_every_update: bool = True) -> None:
    """Let these storms pass, and fail with what to type to see each one again that does harm."""
    problems = [
        f"{command(seed, keeps_every_update)}  # {problem[:300]}"
        for seed in seeds
        for problem in verdict(Run(Storm.draw(seed, keeps_every_update)))
    ]
    if problems:
        pytest.fail("\n".join(problems[:SHOWN]), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_soak(range(0, SEEDS, CHUNK), few=1))
def test_every_acknowledged_update_is_in_the_model_once_and_everybody_finishes(first):
    weather(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_soak(range(0, MEMORY_SEEDS, CHUNK), few=1))
def test_without_a_journal_what_is_lost_is_little_and_announced(first):
    weather(range(first, first + CHUNK), keeps_every_update=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_soak(range(0, SEEDS, 100), few=1))
def test_a_seed_gives_the_same_storm_to_the_last_bit(first):
    for seed in range(first, first + 100, 10):
        once, again = (Run(Storm.draw(seed)).run().digest() for _ in range(2))
        assert once == again, command(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [m if n % 3 == 0 else pytest.param(m, marks=pytest.mark.soak) for n, m in enumerate(MUTANTS)],
    ids=lambda mutant: mutant.name,
)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    mutant.apply(monkeypatch)
    storms = (Storm.draw(seed, keeps_every_update=not mutant.memory) for seed in range(mutant.first, MOST))
    assert any(problem for storm in storms for problem in verdict(Run(storm)))
