"""What a run leaves in its folder, however it ends, and that keeping it cannot end the run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.records import run_store
from shoal.records.recording import record_run
from shoal.records.run_store import RunDescription, RunStore
from shoal.records.stored_runs import find_runs, read_run, read_runs
from shoal.testing.tasks import blobs

RUN = RunDescription("blobs", "bmuf", workers=2, servers=0, config={"lr": 0.1, "strategy.period": 4})
NODE = {"rank": 0, "role": "worker", "step": 3, "loss": float("nan"), "samples": 48}


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "runs", "shoal compare --strategies bmuf")


def only(store):
    (run,) = read_runs(store.path)
    return run


def events(path):
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_a_run_can_be_read_while_it_runs(store):
    with record_run(RUN, store, []) as kept:
        kept.event(NODE)
        kept.output("worker 1", "hello")
        run = only(store)
        assert run.state == "running"
        assert run.about["command"] == "shoal compare --strategies bmuf"
        assert run.about["config"] == {"lr": 0.1, "strategy.period": 4}
        (event,) = events(run.path)
        assert event.pop("time") >= 0
        assert event == {**NODE, "loss": None}
        assert (run.path / "log.txt").read_text() == "worker 1 | hello\n"
        assert run.figure("seconds") >= 0
        kept.done({"strategy": "bmuf", "task": "blobs", "nodes": [], "curve": [], "seconds": 4.5})
    assert (only(store).state, only(store).figure("seconds")) == ("done", 4.5)
    assert only(store).records()[0]["strategy"] == "bmuf"


@pytest.mark.parametrize(
    ("error", "state", "last_line"),
    [
        (
            WorkerFailed("worker 1 failed: boom", "Traceback\n  in train.py\n"),
            "failed",
            "worker 1 failed: boom",
        ),
        (ValueError("no such thing"), "failed", "no such thing"),
        (Interrupted("stopped by Ctrl-C"), "interrupted", "stopped by Ctrl-C"),
        (KeyboardInterrupt(), "interrupted", "stopped by Ctrl-C"),
    ],
)
def test_a_run_that_ends_early_says_how(store, error, state, last_line):
    with pytest.raises(type(error)), record_run(RUN, store, []):
        raise error
    run = only(store)
    assert (run.state, run.about["error"]) == (state, last_line)
    lines = (run.path / "log.txt").read_text().splitlines()
    assert lines[-1] == f"shoal | {last_line}"
    assert ("shoal | Traceback" in lines) == isinstance(error, WorkerFailed)
    assert run.records() == [] and run.figure("seconds") >= 0


def test_warnings_are_kept_and_still_shown(store, caplog):
    with record_run(RUN, store, []):
        logging.getLogger("shoal").warning("worker %d was killed", 3)
    assert (only(store).path / "log.txt").read_text() == "shoal | worker 3 was killed\n"
    assert caplog.messages == ["worker 3 was killed"]
    assert not logging.getLogger("shoal").filters


def test_a_folder_that_breaks_is_left_out_and_the_run_goes_on(store, caplog, monkeypatch):
    with record_run(RUN, store, []) as kept:
        path = store.kept[0]
        monkeypatch.setattr(json, "dumps", lambda *a, **k: 1 / 0)
        for _ in range(5):
            kept.event({**NODE, "lost": True})
        monkeypatch.undo()
        kept.done({"nodes": []})
    assert caplog.messages == [f"the folder {path} is left out from here on: division by zero"]
    assert only(store).state == "killed"  # nobody could write how it ended


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    with record_run(RUN, RunStore(tmp_path / "file" / "runs"), []) as kept:
        kept.event(NODE)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("this run is not kept: ")


def test_a_package_that_is_not_installed_has_no_version(store, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(run_store, "version", missing)
    with record_run(RUN, store, []):
        pass
    assert only(store).about["versions"]["shoal"] == "unknown"


def test_lines_of_many_threads_stay_whole(store):
    with record_run(RUN, store, []) as kept:
        threads = [
            threading.Thread(target=lambda n=n: [kept.output(f"worker {n}", "x" * 50) for _ in range(200)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (only(store).path / "log.txt").read_text().splitlines()
    assert sorted(lines) == sorted(f"worker {n} | {'x' * 50}" for n in range(4) for _ in range(200))


def test_runs_of_one_minute_get_names_of_their_own(store):
    for _ in range(3):
        with record_run(RUN, store, []):
            pass
    first, second, third = (path.name for path in store.kept)
    assert first.startswith("bmuf-") and len({first, second, third}) == 3
    assert {read_run(path).about["first"] for path in store.kept} == {first}


def test_a_script_without_a_strategy_gives_its_name():
    script = RunDescription("train me.py", "as in the script", 1, 0, {})
    assert script.name().startswith("train-me-")


KILLED = """
import os, signal, sys
from pathlib import Path
from shoal.records.recording import record_run
from shoal.records.run_store import RunDescription, RunStore
with record_run(RunDescription("blobs", "sync", 1, 0, {}), RunStore(Path(sys.argv[1])), []) as kept:
    kept.event({"rank": 0, "step": 1})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_launcher_does_not_pass_for_a_running_one(store):
    source = str(Path(shoal.__file__).parents[1])
    subprocess.run([sys.executable, "-c", KILLED, str(store.path)], env={"PYTHONPATH": source}, timeout=60)
    run = only(store)
    assert run.about["state"] == "running"  # it had no time to write more
    assert run.state == "killed"
    assert len(events(run.path)) == 1
    assert run.figure("seconds") < 60


def test_where_it_cannot_be_known_a_run_may_still_be_running(store, monkeypatch):
    with record_run(RUN, store, []):
        pass
    path = store.kept[0]
    about = json.loads((path / "run.json").read_text())
    for change in ({"host": "elsewhere"}, {"locked": False}):
        (path / "run.json").write_text(json.dumps({**about, "state": "running", **change}))
        assert read_run(path).state == "running?"
    (path / "run.json").write_text('{"state": "runn')
    assert read_run(path).state == "unreadable"


@pytest.mark.slow
def test_shoal_run_keeps_a_run_only_if_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_RUNS")
    shoal.run(blobs(), "sync", workers=2, transport="sim")
    assert not list(tmp_path.iterdir())
    result = shoal.run(blobs(), "asgd", workers=2, transport="sim", scale_lr="linear", runs="kept")
    (run,) = find_runs("last", "kept")
    assert (run.state, run.about["strategy"], run.about["servers"]) == ("done", "asgd", 1)
    assert run.about["config"]["lr"] == pytest.approx(0.2)
    (record,) = run.records()
    assert record["test_accuracy"] == run.figure("test_accuracy") == result.test_accuracy
    assert [e["rank"] for e in events(run.path)][-3:] == [0, 1, 2]  # the last progress of each node
    with pytest.raises(ValueError, match=r"runs: .* is not a folder"):
        shoal.run(blobs(), "sync", transport="sim", runs=str(run.path / "run.json"))


@pytest.mark.slow
def test_real_processes_leave_a_folder_and_log_under_its_name(tmp_path):
    shoal.run(blobs(), "sync", workers=2, runs=tmp_path, log=f"csv:{tmp_path}/figures")
    (run,) = read_runs(tmp_path)
    assert run.state == "done" and run.figure("bytes_sent") > 0
    assert (tmp_path / "figures" / f"{run.name}.csv").read_text().startswith("step,samples,seconds,loss,")


@pytest.mark.slow
def test_a_worker_that_is_killed_is_in_the_events_and_in_the_log(tmp_path, crews):
    killed = []

    def kill_once(event):
        if event["rank"] == 0 and not killed:
            (crew,) = crews
            killed.append(crew.members[1])
            crew.members[1].process.kill()

    shoal.run(blobs(), "asgd", workers=2, epochs=40, runs=tmp_path, on_progress=kill_once)
    (run,) = read_runs(tmp_path)
    assert run.state == "done"
    assert [event["rank"] for event in events(run.path) if event.get("lost")] == [1]
    assert "worker 1 was ended by SIGKILL" in (run.path / "log.txt").read_text()
