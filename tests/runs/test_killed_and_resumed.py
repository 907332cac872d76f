"""Processes are killed, and the run goes on from its checkpoints: every sample counts once an epoch."""

import logging
import os
import signal

import pytest
import torch

import shoal
from marks import Tally, tallies
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.core.identity import NodeIdentity
from shoal.storage.checkpoint import Checkpoints

EPOCHS = 6


@pytest.fixture(autouse=True)
def quietly(caplog):
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield


def run(folder, workers=4, **options):
    settings = {"epochs": EPOCHS, "checkpoint": folder, "every": 10, "tests": 0}
    return shoal.run(tallies(), Tally(period=4), workers=workers, **settings, **options)


def counts(result):
    """How often each sample is in the model; averages of 3 workers have rounding errors."""
    torch.testing.assert_close(result.model.marks, result.model.marks.round(), rtol=0, atol=1e-6)
    return set((-result.model.marks.round()).tolist())


def killer(crews, then):
    """Kills worker 1 after 60 steps, and does the other thing when worker 0 has taken 30 more."""
    done = []

    def heard(event):
        if event["rank"] == 0 and event["step"] > 60 and not done:
            done.append(event["step"])
            os.kill(crews[0].members[1].process.pid, signal.SIGKILL)
        elif event["rank"] == 0 and len(done) == 1 and event["step"] > done[0] + 30:
            done.append(event["step"])
            then()

    return heard


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [4, 2])
def test_all_are_killed_while_one_is_away_and_the_run_goes_on(workers, crews, tmp_path):
    def kill_all():
        for member in crews[0].members[:4]:
            if not member.ended:
                os.kill(member.process.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed):
        run(tmp_path, on_progress=killer(crews, kill_all))
    files = Checkpoints(tmp_path, {}, 0, bound=None)
    files._check_config = lambda saved: None
    step = files.newest(NodeIdentity(0, 4, elastic=True))
    assert step >= 50
    assert files.crew_at(step, NodeIdentity(0, 4)).members in ((0, 2, 3), (0, 1, 2, 3))
    assert counts(run(tmp_path, workers)) == {float(EPOCHS)}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_has_come_back_before_all_stop_and_the_run_goes_on(crews, tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, on_progress=killer(crews, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert counts(run(tmp_path)) == {float(EPOCHS)}
