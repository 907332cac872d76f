"""How far N workers move a model on a constant slope: what `scale_lr="auto"` has to make up for."""

from __future__ import annotations

import pytest

from sampling import mostly_soak
from shoal.strategies import (
    BMUF,
    EASGD,
    STRATEGIES,
    AsyncDiLoCo,
    DecoupledDiLoCo,
    DiLoCo,
    HALoS,
    MuLoCo,
    NoLoCo,
    SlowMo,
    StreamingDiLoCo,
)
from shoal.testing import Slope, simulate

WORKERS = 4
SHORT = {  # long enough blocks for a slope, short enough for a test
    "local": {"period": 3},
    "post_local": {"switch": 5, "period": 3},
    "bmuf": {"period": 2},
    "slowmo": {"period": 2},
    "diloco": {"period": 2},
    "streaming_diloco": {"period": 4, "fragments": 1, "overlap": 0, "mixing": 0.0},
    "decoupled_diloco": {"period": 4, "fragments": 1, "overlap": 0, "mixing": 0.0, "quorum": 4},
    "halos": {"period": 2, "exchange": 4, "local_buffer": 2},
    "muloco": {"period": 2},
    "async_diloco": {"period": 2},
    "sparse_loco": {"period": 2},
    "noloco": {"period": 2},
    "downpour": {"warmup": 0},
    "dcasgd": {"strength": 0.0},  # a slope has no curvature to correct for
    "easgd": {"period": 2},
    "eamsgd": {"period": 2},
}
LAGS = {"easgd", "eamsgd"}  # the centre is one of N + 1 that share N workers' steps
SETTLES_SLOWLY = (
    HALoS,
    AsyncDiLoCo,
    BMUF,
    DecoupledDiLoCo,
    DiLoCo,
    EASGD,
    MuLoCo,
    NoLoCo,
    SlowMo,
    StreamingDiLoCo,
)  # momenta and springs
SEARCHES = {"sandblaster"}  # no learning rate: a line search goes as far as the slope does
AGED = {"staleness_aware"}  # its steps shrink by their age: between a mean and a sum of the workers'


def moved(strategy, steps: int) -> float:
    done = simulate(strategy, Slope(), workers=WORKERS, steps=steps)
    node = done.server if strategy.servers else done.worker(0)
    return -float(node.x)


def pace(strategy) -> float:
    """How far the model moves while every worker takes one step, once momenta have settled."""
    first, last = (120, 200) if isinstance(strategy, SETTLES_SLOWLY) else (12, 24)
    return (moved(strategy, last) - moved(strategy, first)) / (last - first)


@pytest.mark.parametrize(
    "word", mostly_soak([word for word in STRATEGIES if word not in {"single", *AGED, *SEARCHES}], few=12)
)
def test_on_a_slope_so_many_steps_of_the_workers_move_the_model_by_one(word):
    strategy = STRATEGIES.make(word, **SHORT.get(word, {}))
    expected = WORKERS / strategy.steps_per_update(WORKERS)
    if word in LAGS:
        expected *= WORKERS / (WORKERS + 1)
    assert pace(strategy) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("word", "options", "averaged"),
    [
        *mostly_soak(
            [
                ("bmuf", {"momentum": 0.5, "variant": "cntk"}, 4 / 3),
                ("bmuf", {"momentum": 0.5}, 2.0),
                ("bmuf", {"momentum": 0.5, "nesterov": False}, 2.0),
                ("slowmo", {"momentum": 0.0, "rate": 2.0}, 2.0),
            ],
            few=1,
        ),
        ("sync_server", {"backup": 1}, 3.0),
        ("softsync", {"collect": 2}, 2.0),
        ("hierarchical", {"collect": 2}, 2.0),
    ],
)
def test_options_change_how_far_a_step_goes(word, options, averaged):
    strategy = STRATEGIES.make(word, **SHORT.get(word, {}), **options)
    assert strategy.steps_per_update(WORKERS) == pytest.approx(averaged)
    if word in ("bmuf", "slowmo"):
        assert pace(strategy) == pytest.approx(WORKERS / averaged, rel=0.02)


def test_an_ensemble_whose_members_see_all_data_takes_as_many_steps_as_one_worker():
    assert STRATEGIES.make("ensemble", all_data=True).steps_per_update(WORKERS) == 1


@pytest.mark.parametrize(
    "word", [word for word in STRATEGIES if word != "halos"]
)  # it has two regions at least
def test_one_worker_needs_nothing_made_up_for(word):
    assert STRATEGIES.make(word).steps_per_update(1) <= 1
