"""A user's own loop goes on from a checkpoint with another number of workers: every sample counts once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from ports import free_port
from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.core.errors import WorkerFailed

LOOP = Path(__file__).with_name("mortal_loop.py")
run_loop = partial(run_a_script, script=LOOP, strategy=None)
pytestmark = [pytest.mark.usefixtures("warm_scripts"), pytest.mark.slow, pytest.mark.timeout(120)]

SAMPLES, EPOCHS = 60, 4


def counts(printed: list[str]) -> torch.Tensor:
    """How often each sample is in the model with which all end."""
    found = [final_weights(lines) for lines in printed]
    assert all(own.equal(found[0]) for own in found)
    return found[0]


def stop(*words: str, workers: int, after: int, **place: object) -> None:
    """A run whose processes all vanish after so many steps."""
    with pytest.raises(WorkerFailed, match="exit code 9"):
        run_loop("--epochs", str(EPOCHS), "--stop-after", str(after), *words, workers=workers, **place)


@pytest.mark.parametrize(
    ("workers", "then", "words", "after"),
    mostly_soak(
        [
            (3, 2, ["--period", "3"], 8),  # in the midst of a block and of a pass
            (2, 3, [], 9),
            (3, 1, [], 7),
            (3, 2, ["--accumulate", "2", "--samples", "96", "--period", "3"], 6),
            (3, 2, ["--batch", "7"], 4),  # the last batches of a pass are not full
            (3, 2, [], 10),  # between two passes
            (2, 4, ["--period", "4"], 11),  # a block that began in the pass before
        ],
        few=2,
    ),
)
def test_every_sample_is_in_the_model_once_an_epoch(workers, then, words, after, tmp_path, caplog):
    saves = {"checkpoint": str(tmp_path), "every": 1}
    stop(*words, workers=workers, after=after, **saves)
    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run_loop("--epochs", str(EPOCHS), "--pause", "0", *words, workers=then, **saves)
    found = counts(printed)
    assert torch.equal(found, torch.full_like(found, float(EPOCHS)))


@pytest.mark.soak
def test_what_is_left_of_a_pass_that_was_over_is_lost_and_that_is_said(tmp_path):
    """The block began with the last batches of the first pass, one of which worker 2 had."""
    saves = {"checkpoint": str(tmp_path), "every": 1}
    stop("--period", "4", workers=3, after=7, **saves)
    printed = run_loop("--epochs", str(EPOCHS), "--pause", "0", "--period", "4", workers=2, **saves)
    found = counts(printed)
    assert found.sum() == EPOCHS * SAMPLES - 4
    assert found.min() == EPOCHS - 1
    assert any("1 batch of workers that are gone will not be trained on" in lines for lines in printed)


@pytest.mark.soak
def test_it_may_change_again_and_again(tmp_path):
    saves = {"checkpoint": str(tmp_path), "every": 2}
    for workers, after in ((3, 5), (2, 11), (4, 15)):
        stop(workers=workers, after=after, **saves)
    printed = run_loop("--epochs", str(EPOCHS), "--pause", "0", workers=3, **saves)
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))


@pytest.mark.soak
@pytest.mark.parametrize("then", [2, 3])
def test_what_was_saved_while_a_worker_was_away_counts(then, tmp_path):
    """Its process takes longer to start than the others take for their next steps."""
    saves = {"checkpoint": str(tmp_path), "every": 1}
    stop("--kill", "1:3", "--pause", "0", workers=3, after=5, **saves)
    assert not (tmp_path / "step-00000004" / "worker-1.json").exists()
    printed = run_loop("--epochs", str(EPOCHS), "--pause", "0", workers=then, **saves)
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))


def test_data_that_nobody_can_deal_are_refused(tmp_path):
    saves = {"checkpoint": str(tmp_path), "every": 1}
    stop("--data", "own", workers=3, after=5, **saves)
    with pytest.raises(
        WorkerFailed, match=r"only be resumed with the workers .*: the loop had not read its data"
    ):
        run_loop("--epochs", str(EPOCHS), "--data", "own", workers=2, **saves)


@pytest.mark.soak
def test_of_data_that_nobody_can_deal_no_step_is_saved_while_a_worker_is_away(tmp_path):
    saves = {"checkpoint": str(tmp_path), "every": 1}
    stop("--data", "own", "--kill", "1:3", "--pause", "0", workers=3, after=6, **saves)
    steps = list(tmp_path.glob("step-*"))
    assert steps and all((folder / "worker-1.json").exists() for folder in steps)


@pytest.mark.soak
def test_beside_a_server_the_numbers_stay(tmp_path):
    saves = {"checkpoint": str(tmp_path), "every": 1, "strategy": "asgd"}
    stop(workers=3, after=5, **saves)
    with pytest.raises(
        WorkerFailed, match=r"workers=3 \(now 2\), and with this strategy your own training loop"
    ):
        run_loop("--epochs", str(EPOCHS), workers=2, **saves)


def agent(folder: Path, port: int, first: bool, log: Path) -> subprocess.Popen[bytes]:
    """One of two nodes with two processes each; torchrun goes on with one of them if the other is lost."""
    quickly = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
    nodes = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"{quickly},is_host={int(first)}"]
    saves = ["-m", "shoal", "run", "--checkpoint", str(folder), "--every", "1", "--timeout", "20"]
    words = [*nodes, *meeting, "--no-python", sys.executable, *saves, str(LOOP), "--epochs", str(EPOCHS)]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--pause", "0.5"]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def lose(node: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its processes, which have sessions of their own."""
    at = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    for pid in [node.pid, *map(int, at.read_text().split())] if at.exists() else ():
        os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_under_torchrun_the_other_node_goes_on_when_one_is_lost(tmp_path):
    log, saved, port = tmp_path / "log", tmp_path / "saved", free_port()
    first = agent(saved, port, True, log)
    second = agent(saved, port, False, tmp_path / "second")
    try:
        deadline = time.monotonic() + 120
        while not list(saved.glob("step-0000000[3-9]")) and time.monotonic() < deadline:
            time.sleep(0.1)
        lose(second)
        assert first.wait(150) == 0, log.read_text()[-3000:]
    finally:
        lose(first)
        lose(second)
    told = log.read_text()
    assert "of a run with 4 workers with 2: the data left is dealt again" in told
    assert torch.equal(final_weights(told), torch.full((SAMPLES,), float(EPOCHS)))
