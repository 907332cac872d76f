"""What a loop does at one worker alone makes models differ that must be equal: a sentence says so."""

from functools import partial
from pathlib import Path

import pytest
import torch

from sampling import mostly_soak
from scripts import final_weights, run_loop
from shoal.api.same_weights import differ
from shoal.core.errors import WorkerFailed

run = partial(run_loop, script=Path(__file__).with_name("drifting_loop.py"))

pytestmark = [pytest.mark.usefixtures("warm_scripts"), pytest.mark.slow]

DIFFERENT = "worker 1 and worker 0 have different weights at step"
OPTIONS = {"slowmo": {"period": "8"}, "post_local": {"switch": "40"}, "local": {"period": "8"}}


ALONE = [("rate", "sync"), ("state", "sync"), ("rate", "slowmo"), ("rate", "demo"), ("state", "post_local")]
EQUAL = [*(("", word) for word in ("sync", "slowmo", "demo")), *(("rate", w) for w in ("local", "gossip"))]


@pytest.mark.parametrize(("what", "strategy"), mostly_soak(ALONE, few=3))
def test_what_one_worker_does_alone_is_refused_at_the_end(what, strategy):
    with pytest.raises(WorkerFailed, match=rf"{DIFFERENT} \d+, and \w+ keeps them equal: .*ReduceLROn"):
        run("--what", what, strategy=strategy, strategy_options=OPTIONS.get(strategy, {}))


@pytest.mark.parametrize("what", mostly_soak(["rate", "batch"], few=1))
def test_sync_refuses_it_long_before_the_end(what):
    with pytest.raises(WorkerFailed, match=f"{DIFFERENT} 100, and Sync"):
        run("--what", what, "--steps", "1000")


def test_so_does_a_run_whose_workers_neither_come_nor_go():
    with pytest.raises(WorkerFailed, match=DIFFERENT):
        run("--what", "state", transport="gloo")


@pytest.mark.parametrize(("what", "strategy"), mostly_soak(EQUAL, few=3))
def test_models_that_are_equal_in_the_end_are_not(what, strategy):
    options = OPTIONS.get(strategy, {})
    first, second = run("--what", what, "--more", "5", strategy=strategy, strategy_options=options)
    assert torch.equal(final_weights(first), final_weights(second))


def test_rounding_is_no_difference_and_a_small_step_is():
    first = torch.linspace(-0.5, 0.5, 100)
    assert not differ(first, first * (1 + 1e-6), 100)
    assert differ(first, first + 1e-3, 100)
    assert not differ(first, first + 1e-3, 1_000_000)
    broken = torch.tensor([1.0, float("nan"), float("inf")])
    assert not differ(broken, broken.clone(), 1)
    assert differ(torch.ones(3), broken, 1)
