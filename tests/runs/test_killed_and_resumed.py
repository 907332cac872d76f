"""Processes are killed, and the run goes on from its checkpoints: every sample counts once an epoch."""

import logging
import os
import signal

import pytest
import torch

import shoal
from marks import Tally, tallies
from sampling import mostly_soak
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.core.identity import NodeIdentity
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.step_folders import steps_in
from throttled import Throttle

EPOCHS = 6


@pytest.fixture(autouse=True)
def quietly(caplog):
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield


def run(folder, workers=4, task=None, strategy=None, **options):
    settings = {"epochs": EPOCHS, "checkpoint": folder, "every": 5, "tests": 0}
    return shoal.run(task or tallies(), strategy or Tally(period=4), workers=workers, **settings, **options)


def counts(result):
    """How often each sample is in the model; averages of 3 workers have rounding errors."""
    torch.testing.assert_close(result.model.marks, result.model.marks.round(), rtol=0, atol=1e-6)
    return set((-result.model.marks.round()).tolist())


def run_with_a_kill(crews, folder, then, strategy=None):
    """Kills worker 1 after 20 steps, and does the other thing when worker 0 has taken 10 more."""
    done = []

    def heard(event):
        if event["rank"] == 0 and event["step"] > 20 and not done:
            done.append(event["step"])
            os.kill(crews[0].members[1].process.pid, signal.SIGKILL)
        elif event["rank"] == 0 and len(done) == 1 and event["step"] > done[0] + 10:
            done.append(event["step"])
            then()

    task = Throttle(folder / "slow", seconds=0.05).task(tallies())  # or steps go by between two events
    return run(folder / "saved", task=task, strategy=strategy, on_progress=heard)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", mostly_soak([2, 4], few=1))
def test_all_are_killed_while_one_is_away_and_the_run_goes_on(workers, crews, tmp_path):
    def kill_all():
        for member in crews[0].members[:4]:
            if not member.ended:
                os.kill(member.process.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed):
        run_with_a_kill(crews, tmp_path, kill_all)
    files = Checkpoints(tmp_path / "saved", {}, 0, bound=None)
    files._check_config = lambda saved: None
    step = files.newest(NodeIdentity(0, 4, elastic=True))
    assert step >= 15
    assert files.crew_at(step, NodeIdentity(0, 4)).members in ((0, 2, 3), (0, 1, 2, 3))
    assert counts(run(tmp_path / "saved", workers)) == {float(EPOCHS)}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.soak
def test_one_has_come_back_before_all_stop_and_the_run_goes_on(crews, tmp_path):
    with pytest.raises(Interrupted):
        run_with_a_kill(crews, tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert counts(run(tmp_path / "saved")) == {float(EPOCHS)}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.soak  # tests/sim/test_resuming_servers.py has it in virtual time
@pytest.mark.parametrize("workers", [3, 4])
def test_beside_a_server_the_run_goes_on_from_a_step_after_a_death(workers, crews, tmp_path):
    """The launcher ends all of a sudden; the newest whole step is one after the death of worker 1."""

    def fail():
        raise RuntimeError("the launcher has had enough")

    with pytest.raises(RuntimeError, match="enough"):
        run_with_a_kill(crews, tmp_path, fail, shoal.strategies.ASGD())
    files = Checkpoints(tmp_path / "saved", {}, 0, bound=None)
    files._check_config = lambda saved: None
    step = max(step for step in steps_in(tmp_path / "saved") if files._is_complete(step))
    assert not files.crew_at(step, NodeIdentity(0, 4)).is_even
    assert counts(run(tmp_path / "saved", workers, strategy=shoal.strategies.ASGD())) == {float(EPOCHS)}
