"""A signal to one process of a run that another program started stops all, with a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from forked import ForkedPython
from ports import free_port

LOOP = Path(__file__).parents[1] / "launch/slurm_loop.py"


def start(folder: Path, processes: int, strategy: str) -> list[ForkedPython]:
    """The processes of a run, which hear what torchrun would tell them."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = ["--strategy", strategy, "--checkpoint", str(folder / "ckpt")]
    line = [sys.executable, "-m", "shoal", "run", *options, str(LOOP), "--until", str(folder / "enough")]
    return [ForkedPython(line, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(processes)]


def await_steps(runs: list[ForkedPython]) -> None:
    """Wait until both workers train."""
    for worker in runs[:2]:
        while "is at 20" not in (line := worker.stdout.readline()):
            assert line, worker.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "processes", "hit", "number"),
    [pytest.param("bmuf", 2, 1, signal.SIGTERM, marks=pytest.mark.soak), ("asgd", 3, 2, signal.SIGUSR1)],
    ids=["a worker", "the server"],
)
def test_a_signal_to_one_stops_all_and_the_same_command_resumes(tmp_path, strategy, processes, hit, number):
    runs = start(tmp_path, processes, strategy)
    await_steps(runs)
    os.kill(runs[hit].pid, number)
    said = [run.communicate() for run in runs]
    assert [run.wait() for run in runs] == [130, 130, 0][:processes], said
    stopped = re.match(r"shoal: stopped before step (\d+)\. The checkpoint is in .* resumes", said[0][1])
    assert stopped is not None and not said[1][1]  # one of them says it
    assert len(list((tmp_path / "ckpt" / f"step-{int(stopped[1]):08d}").glob("*.json"))) == processes
    (tmp_path / "enough").touch()
    again = start(tmp_path, processes, strategy)
    printed = [run.communicate() for run in again]
    assert [run.wait() for run in again] == [0] * processes, printed
    assert [f"begins at {stopped[1]}" in out for out, _ in printed[:2]] == [True, True]
