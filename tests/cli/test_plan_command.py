"""`shoal plan`, and its plan beside the run that follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiles import PROFILE


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "name a script or a task, as in: shoal plan train.py -n 8, or --task mnist"),
        (("--task", "digit"), "unknown task 'digit'. Did you mean 'digits'?"),
        (("--task", "digits", "train.py"), "--task digits and train.py: plan one of the two"),
        (("--task", "digits", "--network", "slow"), "there is no network 'slow'"),
        (("--task", "digits", "--strategies", "bmfu"), "unknown strategy 'bmfu'. Did you mean 'bmuf'?"),
        (("--task", "digits", "--strategies", ","), "--strategies names none; try --strategies sync,bmuf"),
        (("none.py",), "there is no script 'none.py'"),
        (("train.py", "--batch", "4"), "--batch is for a task; a script has its own"),
        (("train.py", "--seed", "0"), "--seed is for a task; a script has its own"),
        (("train.py", "--scale-lr", "auto"), "--scale-lr is for a task; a script sets its own"),
        (("train.py", "--no-trials"), "--trials and --no-trials are for a task"),
        (("train.py", "--epochs", "3"), "--epochs is for a task"),
        (("--task", "digits", "--target", "-1"), "--target -1: an accuracy, or a loss, is a positive number"),
        (("--task", "digits", "-n", "0"), "-n 0: a run needs at least 1 worker"),
    ],
)
def test_bad_input_gets_one_sentence(shoal: Any, words: tuple[str, ...], sentence: str):
    result = shoal("plan", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_plan_is_printed_kept_drawn_and_compared_with_its_run(
    shoal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_RUNS", "none")
    PROFILE.save("here.json")
    where = "--network office --compute 20ms --profile here.json"
    result = shoal(f"plan --task digits -n 2 {where} --no-trials --strategies sync --report p.html --quiet")
    assert result.exit_code == 0, result.stderr
    assert "digits: 9,610 parameters, 20 ms a step; links of 1000 Mbit/s and 0.2 ms" in result.stdout
    assert "Run it:\n  shoal compare --task digits --strategies sync" in result.stdout
    assert Path("p.html").read_text().startswith("<!DOCTYPE html>")
    result = shoal("compare --task digits --strategies sync -n 2 --epochs 1 --sim --plan plan.json --quiet")
    assert result.exit_code == 0, result.stderr
    after = result.stdout.partition("the plan:")[2]
    assert "predicted" in after
    (line,) = [line for line in after.splitlines() if line.split()[:2] == ["sync", "seconds"]]
    assert abs(float(line.split()[-1].strip("%+"))) < 20, line


def test_a_file_that_is_no_plan_is_refused(shoal: Any, tmp_path: Path):
    (tmp_path / "other.json").write_text("[]")
    result = shoal("compare --plan", tmp_path / "other.json")
    assert result.exit_code == 2
    assert "is no plan of this `shoal plan`" in result.stderr
