"""Optuna's samplers as a method of search; skipped where Optuna is not installed."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
from asking import drive

from shoal.core.errors import Unavailable
from shoal.search import METHODS
from shoal.search.space import Space

SPACE = Space(
    {"lr": "log 1e-4..1.0", "batch": [16, 32, 64], "period": "1..8", "betas": [[0.9, 0.99], [0.8, 0.9]]}
)


def bowl(piece) -> float:
    lr, batch, period, betas = piece.values.values()
    return -((math.log10(lr) + 2) ** 2) - (batch != 32) - (period - 5) ** 2 / 10 - (betas == (0.9, 0.99))


def test_without_optuna_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(Unavailable, match=r"pip install 'shoal\[optuna\]'"):
        METHODS.read("optuna").searcher(SPACE, 10, 0)


def test_architectures_and_unknown_samplers_are_refused():
    with pytest.raises(ValueError, match="an architecture is neither"):
        METHODS.read("optuna").check(Space({"architecture": "layers"}))
    with pytest.raises(ValueError, match="sampler='tep' must be one of tpe"):
        METHODS.read("optuna:sampler=tep")


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="no Optuna; install it with: pip install 'shoal[optuna]'")


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_the_same_events_give_the_same_values_so_a_journal_can_be_replayed(optuna, sampler):
    def state(seed: int):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # qmc is experimental to them
            searcher = METHODS.read(f"optuna:length=1,sampler={sampler}").searcher(SPACE, 25, seed)
            drive(searcher, bowl, at_once=2)
        return searcher.state()

    assert state(0) == state(0)
    assert state(0) != state(1)


@pytest.mark.slow
def test_values_are_of_the_space_and_a_failure_is_told(optuna):
    searcher = METHODS.read("optuna:length=2").searcher(SPACE, 61, 0)
    done = drive(searcher, lambda piece: math.nan if piece.trial == 3 else bowl(piece))
    assert len(done) == 30 and searcher.spent == 60
    for piece in done:
        assert 1e-4 <= piece.values["lr"] <= 1.0 and piece.values["batch"] in (16, 32, 64)
        assert isinstance(piece.values["period"], int) and isinstance(piece.values["betas"], tuple)
    assert searcher._study.trials[3].state == optuna.trial.TrialState.FAIL
    assert searcher.best[0] == searcher._study.best_value
