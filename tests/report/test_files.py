"""The JSON record: strict JSON, whole files, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.report import write_json


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_runs_come_back_as_they_were(runs, tmp_path):
    path = write_json(runs, tmp_path / "runs.json")
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["goal"] == {"score": "test_accuracy", "value": 97.0, "given": False}
    assert [run.pop("seconds_to_goal") for run in read["runs"]] == [29.0, 10.0, 46.8, 10.0]
    assert read["runs"] == runs


def test_a_run_that_misses_the_target_has_no_time_to_it(runs, tmp_path):
    read = json.loads(write_json(runs, tmp_path / "runs.json", target=97.4).read_text(encoding="utf-8"))
    assert read["goal"] == {"score": "test_accuracy", "value": 97.4, "given": True}
    assert [run["seconds_to_goal"] for run in read["runs"]] == [29.0, None, 46.8, None]


def test_numbers_that_are_not_finite_become_null(make_run, tmp_path):
    run = make_run(
        "bmuf", test_loss=float("nan"), curve=[{"seconds": float("inf")}], nodes=[{"loss": float("-inf")}]
    )
    (back,) = json.loads(write_json([run], tmp_path / "r.json").read_text(), parse_constant=refuse)["runs"]
    assert (back["test_loss"], back["curve"], back["nodes"]) == (None, [{"seconds": None}], [{"loss": None}])


def test_things_json_does_not_know_become_their_text(make_run, tmp_path):
    run = make_run("bmuf", config={"data": Path("mnist"), "sizes": (1, 2), 3: "three"})
    (back,) = json.loads(write_json([run], tmp_path / "r.json").read_text())["runs"]
    assert back["config"] == {"data": "mnist", "sizes": [1, 2], "3": "three"}


def test_missing_folders_are_made_and_nothing_is_left_beside(runs, tmp_path):
    path = write_json(runs, tmp_path / "a" / "b" / "runs.json")
    assert [item.name for item in path.parent.iterdir()] == ["runs.json"]


def test_a_failed_write_keeps_the_old_file(runs, tmp_path, monkeypatch):
    path = write_json(runs[:1], tmp_path / "runs.json")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(runs, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_error_names_the_file_and_what_to_do(runs, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(
        OSError, match=r"cannot write the report '.*taken/runs.json'.*Name a file in a folder"
    ):
        write_json(runs, tmp_path / "taken" / "runs.json")
