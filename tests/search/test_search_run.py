"""Whole searches on real processes: what they find, how they resume, and that kills lose nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.core.errors import CheckpointError, WorkerFailed
from shoal.core.task import Data, Task
from shoal.search import run
from shoal.search.search_folder import JOURNAL
from shoal.search.search_journal import read_events
from shoal.storage.model_file import load_model
from under_way import UnderWay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPACE = {"lr": ("log", 1e-3, 1.0), "batch": [8, 16], "momentum": (0.0, 0.9)}


def linear() -> torch.nn.Module:
    return torch.nn.Linear(6, 3)


def examples() -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return Data(x[:200], y[:200], x[200:], y[200:])


def broken() -> torch.nn.Module:
    raise KeyError("no such layer")


TASK = Task("linear", linear, examples, batch=8)


def test_a_task_is_named_with_its_options():
    with pytest.raises(ValueError, match="task 'shakespeare' has no option 'layer'"):
        run("shakespeare:layer=1", SPACE)
    with pytest.raises(ValueError, match="unknown metric 'luck'"):  # the task was read before
        run("shakespeare:layers=1", SPACE, metric="luck")


def test_a_search_finds_trains_and_tests_a_model(tmp_path):
    found = run(TASK, SPACE, "pbt:population=4,quantile=0.5", epochs=12, at_once=2, folder=tmp_path / "s")
    assert found.epochs == 12 and found.samples == 12 * 160 and found.kills == 0
    assert {trial["epochs"] for trial in found.trials} == {3}
    assert found.best["score"] == max(p["score"] for p in found.pieces)
    saved = load_model(tmp_path / "s" / "model.safetensors")
    assert torch.equal(saved["weight"], found.model.weight)
    data = examples()
    right = (found.model(data.test_x).argmax(1) == data.test_y).float().mean()
    assert found.test_accuracy == pytest.approx(100 * float(right))

    again = run(TASK, SPACE, "pbt:population=4,quantile=0.5", epochs=12, folder=tmp_path / "s", resume=True)
    assert again.record() == found.record()  # nothing was trained or tested again
    with pytest.raises(ValueError, match="holds a search; resume it"):
        run(TASK, SPACE, "pbt:population=4,quantile=0.5", epochs=12, folder=tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"is another one: epochs=12 \(now 13\)"):
        run(TASK, SPACE, "pbt:population=4,quantile=0.5", epochs=13, folder=tmp_path / "s", resume=True)
    with pytest.raises(ValueError, match="no search in"):
        run(TASK, SPACE, "random", epochs=12, folder=tmp_path / "t", resume=True)


def untested() -> Data:
    data = examples()
    return Data(data.x, data.y, data.test_x[:0], data.test_y[:0])


def test_a_task_without_a_test_set_ends_with_the_scores_of_its_trials():
    task = Task("untested", linear, untested, batch=8)
    found = run(task, SPACE, "random:length=1", epochs=2, at_once=1)
    assert found.metric == "accuracy" and found.best["score"] > 20
    assert found.test_accuracy is None and found.test_loss is None


def test_one_trial_at_a_time_gives_the_same_search_every_time():
    both = [run(TASK, SPACE, "asha:longest=4,reduction=2", epochs=10, at_once=1) for _ in range(2)]
    first, second = ([{**p, "time": 0, "seconds": 0} for p in found.pieces] for found in both)
    assert first == second


def test_a_model_that_cannot_be_built_ends_the_search_with_its_traceback():
    with pytest.raises(WorkerFailed, match="the first 3 trials all failed; trial 0: KeyError") as failure:
        run(Task("broken", broken, examples), {"lr": (0.1, 1.0)}, "random:length=1", epochs=8, at_once=1)
    assert "in broken" in failure.value.details


def test_a_name_that_is_not_known_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"no hyper-parameter 'moment'. Did you mean 'momentum'"):
        run(TASK, {"moment": (0.0, 0.9)}, folder=tmp_path / "s")
    with pytest.raises(ValueError, match="too few for a single trial"):
        run(TASK, SPACE, "random:length=5", epochs=4, folder=tmp_path / "s")
    with pytest.raises(ValueError, match="'ensemble' trains models of its own"):
        run(TASK, {"lr": (0.1, 1.0)}, strategy="ensemble", workers=2, folder=tmp_path / "s")
    with pytest.raises(ValueError, match="unknown transport 'sim'"):
        run(TASK, SPACE, transport="sim", folder=tmp_path / "s")
    with pytest.raises(ValueError, match="cells need images, and an example of this task is 6"):
        run(TASK, {"architecture": "cells"}, "evolution", folder=tmp_path / "s")
    with pytest.raises(ValueError, match="name it with folder"):
        run(TASK, SPACE, resume=True)
    with pytest.raises(ValueError, match="cannot be handed to the processes of trials"):
        run(Task("local", lambda: None, examples), SPACE, "random:length=2", folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_eight_trials_of_which_every_other_is_killed_end_with_a_best_and_none_is_lost():
    killed: set[int] = set()

    def kill_every_other(slots) -> None:
        start = slots.start

        def start_and_kill(piece, origin) -> None:
            start(piece, origin)
            if piece.number % 2 and piece.number not in killed:
                killed.add(piece.number)
                os.kill(
                    next(slot.process.pid for slot in slots._slots if slot.piece == piece.number),
                    signal.SIGKILL,
                )

        slots.start = start_and_kill

    found = run(TASK, SPACE, "random:length=2", epochs=16, at_once=2, on_start=kill_every_other)
    assert found.kills == len(killed) == 4
    assert len(found.trials) == 8 and all(trial["epochs"] == 2 for trial in found.trials)
    undisturbed = run(TASK, SPACE, "random:length=2", epochs=16, at_once=2)
    assert [t["best_score"] for t in found.trials] == [t["best_score"] for t in undisturbed.trials]


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_sixty_four_trials_survive_a_kill_every_two_seconds():
    space = {"lr": ("log", 1e-3, 3.0), "batch": [16, 32, 64], "momentum": (0.0, 0.99)}
    found, kills = storm(space, every=2.0)
    assert len(found.trials) == 64 and all(trial["epochs"] == 10 for trial in found.trials)
    assert found.test_accuracy is not None and found.test_accuracy > 90 and kills >= 2


def storm(space, every: float):
    """64 trials of digits while a process that trains is killed every so many seconds."""
    over, kills, threads = threading.Event(), [0], []

    def kill(slots) -> None:
        while not over.wait(every):
            for pid in slots.pids[:1]:
                os.kill(pid, signal.SIGKILL)
                kills[0] += 1

    def begin(slots) -> None:
        threads.append(threading.Thread(target=kill, args=[slots]))
        threads[0].start()

    try:
        found = run("digits", space, "random:length=10", epochs=640, at_once=2, on_start=begin)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return found, kills[0]


COMMAND = [
    *("search", "--task", "digits", "--method", "random:length=4", "--vary", "lr=log 1e-3..1.0"),
    *("--epochs", "40", "--at-once", "1", "--folder", "s", "--runs", "r", "--quiet"),
]


@pytest.mark.soak
def test_ctrl_c_stops_in_order_and_the_same_command_goes_on(tmp_path):
    process = started(COMMAND, tmp_path)
    wait_for_reports(tmp_path / "s", 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "The search is in s; the same command with --resume goes on." in err
    before = read_events(tmp_path / "s" / JOURNAL)[0]
    assert before[-1]["event"] == "report"  # what was under way was finished
    resumed = started([*COMMAND, "--resume", "--json", "out.json"], tmp_path)
    out, err = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, err
    assert "The best of 10 trials" in out and "model: s/model.safetensors" in out
    events = read_events(tmp_path / "s" / JOURNAL)[0]
    assert events[: len(before)] == before
    assert sorted(e["trial"] for e in events if e["event"] == "report") == list(range(10))
    assert json.loads((tmp_path / "out.json").read_text())["epochs"] == 40
    assert [p.name.startswith("random-") for p in (tmp_path / "r").iterdir()] == [True, True]


@pytest.mark.soak
def test_sigterm_ends_a_search_at_once_and_leaves_nothing(tmp_path):
    line = "search --task digits --method random:length=4 --vary lr=0.1..0.2 --epochs 4000 --folder s --quiet"
    with UnderWay(tmp_path, f"{line} --at-once 1 --workers 2 --strategy asgd") as search:
        search.await_that(lambda: list(tmp_path.glob("s/pieces/*/step-*")))
        os.killpg(search.process.pid, signal.SIGTERM)
        assert search.end(25) == 143, search.printed
        assert "stopped by SIGTERM. The search is in s; the same command with --resume" in search.printed
        assert search.left() == []


@pytest.mark.soak
@pytest.mark.alone
def test_a_killed_controller_leaves_no_process_and_is_resumed(tmp_path):
    process = started(COMMAND, tmp_path)
    wait_for_reports(tmp_path / "s", 2, process)
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not marked(tmp_path), 30)
    resumed = started([*COMMAND, "--resume"], tmp_path)
    _, err = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, err
    events = read_events(tmp_path / "s" / JOURNAL)[0]
    assert sorted(e["trial"] for e in events if e["event"] == "report") == list(range(10))


@pytest.mark.soak
def test_trials_may_be_distributed_runs_with_a_server():
    space = {"lr": ("log", 0.05, 0.5), "strategy.period": "1..4", "codec": "none,fp16"}
    found = run(
        TASK, space, "pbt:population=2,quantile=0.5", epochs=4, at_once=1, strategy="easgd", workers=2
    )
    assert found.epochs == 4 and found.best["score"] > 40


def started(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SEARCH_TEST": str(folder)},
        start_new_session=True,
    )


def marked(folder: Path) -> list[str]:
    """The processes that were started for a search in that folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SEARCH_TEST={folder}".encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:  # it has just ended, or is not ours
            continue
    return found


def wait_for_reports(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    path = folder / JOURNAL

    def reported() -> bool:
        assert process.poll() is None, process.communicate()
        return path.exists() and path.read_text().count('"report"') >= count

    wait_until(reported, 120)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)
