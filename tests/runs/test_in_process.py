"""A run of one node in this process, as the trials of a search are trained."""

from __future__ import annotations

import pytest
import torch

from shoal.api.run import run
from shoal.core.codec import Identity
from shoal.launch.audience import Audience
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.runs.processes import run_in_process
from shoal.strategies import Single, Sync

pytestmark = pytest.mark.slow


def plan(**settings) -> Plan:
    return Plan(**{"task": TASKS.make("digits"), "strategy": Single(), "codec": Identity(), **settings})


def test_it_gives_the_bits_of_virtual_time_and_saves_its_model(tmp_path):
    here = run_in_process(plan(epochs=2, checkpoint=str(tmp_path)), Audience(None))
    there = run("digits", "single", epochs=2, transport="sim")
    for mine, theirs in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert here.test_accuracy == there.test_accuracy and len(here.curve) == len(there.curve)
    assert (tmp_path / "model.safetensors").exists()


def test_with_no_tests_the_model_is_tested_at_the_end_alone():
    (point,) = run_in_process(plan(tests=0), Audience(None)).curve
    whole = run("digits", "single", transport="sim", tests=4).curve
    assert point["test_accuracy"] == whole[-1]["test_accuracy"]
    assert len(whole) in (5, 6)  # the start, every quarter and the end


def test_several_nodes_and_fewer_than_no_tests_are_refused():
    with pytest.raises(ValueError, match="a run of 2 nodes needs a process for each"):
        run_in_process(plan(strategy=Sync(), workers=2), Audience(None))
    with pytest.raises(ValueError, match="tests=-1"):
        plan(tests=-1)
