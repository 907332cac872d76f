"""A killed worker of a run with a server is started again: it trains on, and every batch is in the model."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import shoal
from convex import convex
from marks import BATCH, marks
from one_kill import run_with_a_kill
from shoal.strategies import Sandblaster
from throttled import Throttle

WORKERS, VICTIM = 4, 1
SAYS = f"worker {VICTIM} was ended by SIGKILL; the other 3 go on, and it is started again"


@pytest.fixture
def throttle(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="shoal")
    return Throttle(tmp_path / "slow", seconds=0.02)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["processes", pytest.param("grpc", marks=pytest.mark.soak)])
def test_every_batch_is_in_the_model_once(crews, throttle, caplog, transport):
    settings = {"workers": WORKERS, "epochs": 3, "transport": transport}
    result = run_with_a_kill(
        throttle.task(marks()), "asgd", VICTIM, crews, throttle, returns=True, **settings
    )
    assert SAYS in caplog.text
    assert result.model.marks.eq(-3).all()
    assert result.nodes[VICTIM]["steps"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_worker_of_hogwild_finds_the_shared_memory_again(crews, throttle, caplog, servers):
    """It may have added its last batch before it could say so: then others add that batch again."""
    settings = {"workers": WORKERS, "servers": servers, "epochs": 3}
    task = throttle.task(marks())
    result = run_with_a_kill(task, "hogwild", VICTIM, crews, throttle, returns=True, **settings)
    assert SAYS in caplog.text
    twice = result.model.marks.eq(-4)
    assert torch.where(twice, -3, result.model.marks).eq(-3).all()
    assert twice.sum() <= BATCH
    assert result.nodes[VICTIM]["steps"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["processes", pytest.param("grpc", marks=pytest.mark.soak)])
def test_a_worker_of_sandblaster_takes_portions_again(crews, throttle, caplog, transport):
    task, strategy = replace(convex(), batch=8), Sandblaster(tolerance=1e-8, l2=0.01)
    settings = {"workers": WORKERS, "servers": 2, "epochs": 60}
    whole = shoal.run(task, strategy, transport="sim", **settings)
    slow = throttle.task_with_slow_loss(task)
    settings |= {"transport": transport}
    result = run_with_a_kill(slow, strategy, VICTIM, crews, throttle, returns=True, after=5, **settings)
    assert SAYS in caplog.text
    assert torch.allclose(result.model.weight, whole.model.weight, rtol=0, atol=1e-9)
    assert result.nodes[VICTIM]["steps"] > 0
