"""`shoal runs` and `shoal report`: what a command leaves, found again by the next."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys

import pytest

from forked import ForkedPython

warm = pytest.mark.usefixtures("warm_scripts")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of one's own to work in, with runs kept where they are by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_RUNS")
    return tmp_path


def compared(shoal, strategies, more=""):
    result = shoal(f"compare --sim --quiet -n 2 --task digits --strategies {strategies} {more}")
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.slow
def test_a_comparison_leaves_a_folder_for_each_row_and_comes_back(shoal, here):
    first = compared(shoal, "single,sync")
    assert first.stdout.endswith("kept: 2 runs in shoal-runs\n")
    again = shoal("report last --report page.html --json out.json")
    assert again.exit_code == 0, again.stderr
    table = first.stdout.partition("kept:")[0].strip()
    assert again.stdout.strip().startswith(table)
    assert (here / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert len(json.loads((here / "out.json").read_text())["runs"]) == 2

    listed = shoal("runs").stdout.splitlines()
    assert [line.split()[0].split("-")[0] for line in listed] == ["run", "sync", "single", "v:"]
    assert max(map(len, listed)) <= 80
    (found,) = json.loads(shoal("runs single --json").stdout)
    assert (found["state"], found["workers"]) == ("done", 1)
    assert "shoal compare --sim --quiet" in found["command"]
    assert shoal("runs easgd").stdout == "No run in shoal-runs matches easgd.\n"

    compared(shoal, "sync", "--runs elsewhere")
    (other,) = (here / "elsewhere").iterdir()
    mixed = shoal("report out.json", other)
    assert mixed.exit_code == 0, mixed.stderr
    rows = [line.split()[0] for line in mixed.stdout.splitlines()[4:7]]
    assert rows[0] == "single"  # two are called sync, and get the names of their folders
    assert rows[1].startswith("sync-") and rows[2].startswith(f"{other.name}")
    compared(shoal, "sync", "--runs none")
    assert len(shoal("runs").stdout.splitlines()) == 4


@pytest.mark.slow
def test_figures_are_logged_under_the_runs_own_name(shoal, here):
    compared(shoal, "single,asgd", "--log csv:figures --log csv:again")
    kept = sorted(p.name for p in (here / "shoal-runs").iterdir())
    assert sorted(p.stem for p in (here / "figures").iterdir()) == kept
    with (here / "figures" / f"{kept[0]}.csv").open() as file:
        rows = list(csv.DictReader(file))
    ended = [row for row in rows if row["test_loss"] == ""][-1]
    assert float(ended["worker_1/samples"]) > 0 and ended["staleness"]
    assert float(rows[-1]["test_accuracy"]) > 50 and rows[-1]["samples"] == ended["samples"]
    assert [p.read_text() for p in sorted((here / "figures").iterdir())] == [
        p.read_text() for p in sorted((here / "again").iterdir())
    ]


@pytest.mark.slow
@warm
def test_a_script_leaves_its_output_and_its_failure(shoal, here):
    (here / "train.py").write_text(
        "import sys, torch, shoal\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "training = shoal.attach(model, optimizer, 'sync')\n"
        "print('hello from', training.rank)\n"
        "if len(sys.argv) > 1:\n    raise RuntimeError(sys.argv[1])\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = shoal("run -n 2 --quiet train.py")
    assert done.exit_code == 0, done.stderr
    failed = shoal("run -n 2 --quiet --runs shoal-runs train.py", "boom")
    assert failed.exit_code == 1
    broken, whole = json.loads(shoal("runs --json").stdout)
    log = (here / "shoal-runs" / whole["name"] / "log.txt").read_text().splitlines()
    assert {"worker 0 | hello from 0", "worker 1 | hello from 1"} <= {*log}
    assert whole["config"]["arguments"] == [] and whole["state"] == "done"
    assert broken["state"] == "failed" and broken["error"].endswith("failed: RuntimeError: boom")
    log = (here / "shoal-runs" / broken["name"] / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    report = shoal("report", broken["name"])
    assert report.exit_code == 1
    assert f"note: {broken['name']} has no figures: it is failed" in report.stderr
    assert report.stderr.endswith("shoal: none of these runs has figures yet\n")


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_is_listed_as_killed(shoal, here):
    (here / "train.py").write_text(
        "import time, torch, shoal\n"
        "model = torch.nn.Linear(4, 1)\n"
        "shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), 'sync')\n"
        "print('attached', flush=True)\n"
        "time.sleep(300)\n"
    )
    code = f"import sys, tempfile; tempfile.tempdir = {str(here)!r}\n"  # a killed launcher cannot clean up
    code += "from shoal.cli import app; app(['run', '--quiet', 'train.py'])"
    launcher = ForkedPython([sys.executable, "-c", code], env=dict(os.environ))
    assert any("attached" in said for said in iter(launcher.stdout.readline, ""))
    assert state_of_the_only_run(shoal) == "running"
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    launcher.wait()
    assert state_of_the_only_run(shoal) == "killed"


def state_of_the_only_run(shoal):
    _, row = shoal("runs").stdout.splitlines()
    return row.split()[-4]


def test_a_folder_that_cannot_be_written_is_refused_only_if_it_was_named(shoal, here, monkeypatch):
    (here / "file").touch()
    refused = shoal("compare --sim --runs file")
    assert (refused.exit_code, refused.stderr) == (2, "shoal: --runs: file is not a folder\n")
    monkeypatch.setenv("SHOAL_RUNS", "file")
    assert shoal("compare --sim").stderr == "shoal: SHOAL_RUNS: file is not a folder\n"


def test_under_torchrun_nothing_is_kept_and_asking_for_it_is_refused(shoal, here, monkeypatch):
    (here / "train.py").touch()
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for asked in ("--log csv:figures", "--runs kept"):
        refused = shoal(f"run {asked} train.py")
        assert refused.exit_code == 2
        assert (
            f"{asked} does not work here: figures are collected only from processes that Shoal"
            in refused.stderr
        )
