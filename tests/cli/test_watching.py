"""shoal run --watch and shoal watch, as typed."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, shoal
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer)
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    training.report(loss)
training.finish()
training.report(test_accuracy=12.5)
print("<script>done</script>")
"""


def address_in(lines: object) -> str:
    for line in lines:  # type: ignore[attr-defined]
        if found := re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line):
            return found[0]
    raise AssertionError("no address was printed")


@pytest.mark.slow
def test_a_run_serves_its_page_and_can_be_watched_again(tmp_path, warm_programs):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shoal = [sys.executable, "-m", "shoal"]
    runs = ["--runs", str(tmp_path / "runs")]
    ended = subprocess.run(
        [*shoal, "run", "-n", "2", "--watch", *runs, str(script)], capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    address = address_in(ended.stderr.splitlines())
    assert "from another machine: shoal watch " in ended.stderr
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address)  # it ends with the run
    with subprocess.Popen([*shoal, "watch", "last", *runs], stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            again = address_in(iter(watch.stdout.readline, ""))
            with urllib.request.urlopen(again + "events") as stream:
                first = stream.readline() + stream.readline()
            assert b'"phase":"done"' in first and b'"test_accuracy":12.5' in first
            assert b"<script>done</script>" in first and b'"loss":null' not in first.partition(b'"frames"')[0]
        finally:
            watch.terminate()


def test_a_run_that_is_not_there_is_refused(shoal, tmp_path):
    (tmp_path / "runs").mkdir()
    ended = shoal("watch nothing --runs", tmp_path / "runs")
    assert ended.exit_code == 2 and "there is no run in" in ended.stderr


def test_watching_processes_of_another_launcher_is_refused(shoal, tmp_path: Path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    ended = shoal("run --watch --transport gloo", script)
    assert ended.exit_code == 2
    assert "--watch does not work here: figures are collected only from processes that Shoal" in ended.stderr
