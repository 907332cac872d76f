"""`shoal search`: its table and files, and what it refuses once torch is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.records.stored_runs import read_runs

pytestmark = pytest.mark.slow


def test_a_search_prints_its_best_trials_and_writes_its_files(shoal, tmp_path: Path):
    pytest.importorskip("sklearn")
    line = f"search --method random:length=1 --epochs 3 --quiet --folder {tmp_path}/s --runs {tmp_path}/r"
    files = ["--json", tmp_path / "found.json", "--report", tmp_path / "page.html"]
    done = shoal(line, "--vary", "lr=log 1e-2..1.0", *files)
    assert done.exit_code == 0, done.output
    assert "The best of 3 trials" in done.stdout and "which was used once" in " ".join(done.stdout.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["trials"]) == 3 and found["config"]["space"] == {"lr": "log 0.01..1.0"}
    assert "<h2>Parallel coordinates" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "s" / "model.safetensors").exists()
    (kept,) = read_runs(tmp_path / "r")
    assert (kept.state, kept.about["strategy"]) == ("done", "random")
    assert kept.score("test_accuracy") == found["test_accuracy"]
    again = shoal(line, "--vary", "lr=log 1e-2..1.0")
    assert again.exit_code == 2 and "holds a search; resume it with --resume" in again.stderr


@pytest.mark.parametrize(
    ("vary", "why"),
    [
        ("momentun=0..0.9", "no hyper-parameter 'momentun'. Did you mean 'momentum'? Known: lr, batch"),
        ("strategy.period=1..8", "no hyper-parameter 'strategy.period'"),
        ("batch=0..8", "batch = 0: batch=0: a batch holds at least 1 sample"),
        ("lr=fast,slow", "lr = fast"),
    ],
)
def test_what_no_run_could_use_is_refused_before_a_folder_is_made(shoal, tmp_path: Path, vary: str, why: str):
    done = shoal(f"search --folder {tmp_path}/s --quiet", "--vary", vary)
    assert done.exit_code == 2 and why in done.stderr
    assert not list((tmp_path / "s").glob("*"))
