"""`shoal runs rm` removes what it was told to, after a question, and nothing that is under way."""

from __future__ import annotations

import fcntl
import json
import socket

import pytest
from typer.testing import CliRunner

from shoal.cli import app


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder with three runs that have ended; the last two are of one command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_RUNS")
    runs = {"bmuf-1117-0758": "bmuf-1117-0758"} | dict.fromkeys(
        ["single-1117-0800", "sync-1117-0800"], "single-1117-0800"
    )
    for minute, (name, first) in enumerate(runs.items()):
        keep(tmp_path / "shoal-runs" / name, state="done", started=f"2026-11-17T07:0{minute}:00", first=first)
    return tmp_path / "shoal-runs"


def keep(folder, **about):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "events.jsonl").touch()
    return folder


def names(kept):
    return sorted(path.name for path in kept.iterdir())


def answer(line, said):
    return CliRunner().invoke(app, line.split(), input=said)


def test_a_run_is_removed_after_a_question(kept):
    asked = answer("runs rm bmuf", "y\n")
    assert asked.exit_code == 0, asked.stderr
    assert asked.stdout.startswith("shoal-runs/bmuf-1117-0758  done, started 17 Nov 2026 07:00\n")
    assert "Remove this run for good? [y/N]" in asked.stdout
    assert asked.stdout.endswith("removed: shoal-runs/bmuf-1117-0758\n")
    assert names(kept) == ["single-1117-0800", "sync-1117-0800"]


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [("n\n", 0, "Nothing was removed.\n"), ("\n", 0, "Nothing was removed.\n"), ("", 2, "nobody answered")],
)
def test_without_a_yes_nothing_is_removed(kept, said, code, told):
    asked = answer("runs rm last", said)
    assert asked.exit_code == code
    assert "Remove these 2 runs for good?" in asked.stdout and told in asked.stdout + asked.stderr
    assert len(names(kept)) == 3


def test_yes_removes_without_a_question_and_each_run_once(shoal, kept):
    removed = shoal("runs rm --yes last sync-1117 shoal-runs/single-1117-0800")
    assert removed.exit_code == 0, removed.stderr
    assert removed.stdout.splitlines() == [
        "removed: shoal-runs/single-1117-0800",
        "removed: shoal-runs/sync-1117-0800",
    ]
    assert names(kept) == ["bmuf-1117-0758"]


def test_a_run_that_may_be_under_way_is_refused_and_no_other_is_removed(shoal, kept):
    elsewhere = keep(kept / "far-1117-0900", state="running", locked=True, host="elsewhere")
    refused = shoal("runs rm --yes bmuf far")
    assert refused.exit_code == 2
    assert "nobody can tell from here whether far-1117-0900 is still running" in refused.stderr
    here = keep(kept / "near-1117-0900", state="running", locked=True, host=socket.gethostname())
    with (here / "events.jsonl").open("rb") as events:
        fcntl.flock(events, fcntl.LOCK_EX)
        refused = shoal("runs rm --yes bmuf near")
    assert refused.stderr == "shoal: near-1117-0900 is running; stop it with Ctrl-C first\n"
    assert len(names(kept)) == 5 and elsewhere.is_dir()
    assert shoal("runs rm --yes near").exit_code == 0  # its launcher was killed


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("runs rm", "needs the names of runs"),
        ("runs rm --yes 1117-0800", "could be sync-1117-0800, single-1117-0800; name more of it"),
        ("runs rm --yes easgd", "no run in shoal-runs is called 'easgd'"),
        ("runs rm --yes --json bmuf", "--json and --sort belong to the list"),
        ("runs --yes bmuf", "--yes belongs to `shoal runs rm RUN...`"),
    ],
)
def test_what_is_not_clear_removes_nothing(shoal, kept, line, sentence):
    refused = shoal(line)
    assert refused.exit_code == 2 and sentence in refused.stderr
    assert len(names(kept)) == 3
