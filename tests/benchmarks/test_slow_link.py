"""slow_link.py: its figures, the bytes that the kernel counts, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.studies import shaped_hosts

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ["--task", "digits", "--hidden", "256", "--batch", "16", "--steps", "8", "--period", "4"]
PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
ENDING_SECONDS = 60.0  # on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
alone = pytest.mark.alone


@pytest.fixture(autouse=True, scope="module")
def a_lab_can_be_made() -> None:
    pytest.importorskip("sklearn")
    try:
        if (why := shaped_hosts.obstacle()) is not None:
            pytest.skip(why)
        with shaped_hosts.ShapedHosts(1, 1e9):
            pass
    except RuntimeError as refused:  # root in a container may lack the right
        pytest.skip(str(refused))


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(FOLDER / "slow_link.py"), *TINY, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_by(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in shaped_hosts.namespaces() if f"-{process.pid}-" in name]


@alone
@pytest.mark.soak
def test_every_strategy_has_its_figures_and_the_kernel_counts_what_is_expected(tmp_path):
    with start("--rate", "1gbit", "--strategies", "ddp,sync", "--json", str(tmp_path / "all")) as run:
        said, complaints = run.communicate(timeout=240)
    assert run.returncode == 0, complaints
    figures = json.loads(said.splitlines()[-1])
    assert figures.keys() == {"ddp", "sync"}
    assert all(each.keys() == {"seconds", "accuracy", "step"} for each in figures.values())
    assert figures["sync"]["accuracy"] == pytest.approx(figures["ddp"]["accuracy"], abs=0.6)  # two samples
    exchanges = {"ddp": 8, "sync": 8 + 1}  # a loop under sync ends with an exchange of nothing
    written = json.loads((tmp_path / "all").read_text())
    for word, times in exchanges.items():
        assert written[word]["parameters"] == PARAMETERS
        for sent in written[word]["bytes_sent"]:
            assert 1.0 < sent / (times * 4 * PARAMETERS) < 1.2, word  # headers, acknowledgements, meeting
    assert left_by(run) == []


@pytest.mark.soak
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_is_stopped_removes_namespaces_and_workers(number, status):
    with start("--steps", "100000") as run:
        wait_until_workers_start(run)
        workers = [pid for name in left_by(run) for pid in shaped_hosts.ip("netns", "pids", name).split()]
        os.kill(run.pid, number)
        run.communicate(timeout=ENDING_SECONDS)
    assert run.returncode == status
    assert left_by(run) == []
    assert workers
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@alone
@pytest.mark.soak
def test_what_a_killed_run_leaves_is_removed_by_the_next():
    with start("--steps", "100000") as run:
        wait_until_workers_start(run)
        run.kill()
    assert left_by(run)
    with shaped_hosts.ShapedHosts(1, 1e9):
        assert left_by(run) == []


def wait_until_workers_start(run: subprocess.Popen[str]) -> None:
    assert run.stderr is not None
    for line in run.stderr:
        if "loading" in line:
            return
    raise AssertionError("it ended before it began")


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    assert shaped_hosts.obstacle() is None
    monkeypatch.setattr(shaped_hosts.shutil, "which", {"ip": "/sbin/ip"}.get)
    assert shaped_hosts.obstacle() == "the program 'tc' is missing; install iproute2"
    monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 1000)
    assert shaped_hosts.obstacle() == "network namespaces need root"
