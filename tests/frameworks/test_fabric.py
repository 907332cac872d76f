"""Lightning Fabric with ShoalFabricStrategy: the user's loop, set up by Fabric."""

from __future__ import annotations

import runpy

import pytest
import torch
from framework_runs import FOLDER, assert_close, needs, run_alone, run_by_torchrun, run_many, said, weights

from shoal.core.errors import WorkerFailed

SCRIPT = "fabric_loop.py"
VARIANTS = {"plain": {}, "accumulated": {"accumulate": 2}, "bf16": {"fabric": {"precision": "bf16-mixed"}}}

pytestmark = [needs("lightning", "lightning"), pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_train_as_one_process_would(variant, tmp_path):
    """One worker to the bit; two with half the batch each up to rounding. Worker 0 alone prints and saves."""
    options = VARIANTS[variant]
    plain = run_alone(SCRIPT, tmp_path / "plain", batch=30, **options)
    alone = run_alone(SCRIPT, tmp_path / "alone", batch=30, strategy="sync", **options)
    assert torch.equal(weights(plain), weights(alone))
    first, second = run_many(SCRIPT, tmp_path / "two", batch=15, **options)
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(plain), 1e-2 if variant == "bf16" else 1e-5)
    mean, _, *rest = said(first, "mean").split(maxsplit=2)
    assert float(mean) == pytest.approx(float(said(plain, "mean").split()[0]), abs=1e-2)
    assert said(first, "mean") == said(second, "mean")
    assert rest == ["[0, 1] of 0"]
    assert "printed once" in first and "printed once" not in second


def test_the_common_model_is_saved_and_a_resumed_run_ends_alike(tmp_path):
    whole = run_many(SCRIPT, tmp_path / "whole", batch=15, epochs=3)
    saved = tmp_path / "whole" / "1.ckpt"
    resumed = run_many(SCRIPT, tmp_path / "rest", batch=15, epochs=3, resume=str(saved))
    assert torch.equal(weights(whole[0]), weights(resumed[0]))
    run_many(SCRIPT, tmp_path / "own", launch=None, strategy="local", options={"period": 1000}, batch=15)
    kept = torch.load(tmp_path / "own" / "1.ckpt", weights_only=False)["model"]
    start = runpy.run_path(str(FOLDER / "samples.py"))["network"]().state_dict()
    assert all(torch.equal(kept[name], p) for name, p in start.items())  # nothing was merged before the end


def test_weights_that_would_not_reach_the_strategy_are_refused(tmp_path):
    with pytest.raises(WorkerFailed, match="load them before"):
        run_many(SCRIPT, tmp_path, launch="local", batch=15, loads=True)


def test_torchrun_starts_workers_too(tmp_path):
    """Each prints its weights: both the same, and those of one process with the whole batch."""
    plain = run_alone(SCRIPT, tmp_path / "plain", batch=30)
    done = run_by_torchrun(SCRIPT, tmp_path / "two", batch=15, strategy="sync")
    assert done.returncode == 0, done.errors
    first, second = done.printed
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(plain))
    assert "printed once" in first and "printed once" not in second
