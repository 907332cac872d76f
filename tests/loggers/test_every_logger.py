"""TensorBoard, W&B, MLflow and CSV get the same figures under the same names, as their own readers tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import logged_figures
from logged_figures import log_a_run
from shoal import Logger
from shoal.loggers import figures
from shoal.loggers.log_option import WORDS

PROGRAM = Path(logged_figures.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "records.md"


class Memory(Logger):
    """A user's own: it keeps what it is told."""

    def __init__(self):
        self.told = {}
        self.calls = []

    def start(self, name, config):
        self.calls.append(("start", name, dict(config)))

    def log(self, figures, *, step, samples, seconds):
        assert figures["samples"] == samples and figures["seconds"] == seconds
        for name, value in figures.items():
            self.told.setdefault(name, []).append((step, value))

    def finish(self, state):
        self.calls.append(("finish", state))


@pytest.fixture
def expected(monkeypatch):
    for name in ("ROW_SECONDS", "ROWS"):
        monkeypatch.setattr(figures, name, getattr(figures, name))  # put back what log_a_run changes
    memory = Memory()
    log_a_run(memory)
    return memory


def test_a_logger_of_yours_gets_every_figure(expected):
    told = expected.told
    assert expected.calls[0][1] == "downpour-1117-0742" and expected.calls[-1] == ("finish", "done")
    assert told["worker_0/loss"][-1] == (4, 0.25)
    assert told["loss"][-1] == (4, 0.25)  # worker 1 is lost, so worker 0's
    assert told["bytes_sent"][-1] == (4, 4000 + 2000 + 2000)  # the lost worker's and the server's, too
    assert told["workers"][-1] == (4, 1)
    assert told["samples"][-3:] == [(4, 600), (0, 0), (4, 600)]  # then the two tests
    assert told["staleness"][-1] == (4, 2.5) and "worker_0/staleness" not in told
    assert told["test_accuracy"] == [(0, 10.0), (4, 80.0)]
    assert told["frame errors"] == [(0, 90.0), (4, 9.5)]
    assert "server_0/loss" not in told and "saved_seconds" not in told  # nothing is made up


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_what_is_logged_is_the_same_everywhere(word, expected, tmp_path):
    needs = WORDS[word].needs
    if needs and find_spec(needs) is None:
        pytest.skip(f"needs {needs}: pip install 'shoal[{word}]'")
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), word, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "HOME": str(tmp_path), "WANDB_SILENT": "true"},
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == expected.told.keys()
    for name, history in expected.told.items():
        there, wanted = points(found[name]), points(history)
        assert [step for step, _ in there] == [step for step, _ in wanted], name
        assert [value for _, value in there] == [value for _, value in wanted], name


def points(history):
    """Without repetitions, which a database does not keep, and as exact as TensorBoard's float32."""
    return sorted({(step, float(f"{value:.6g}")) for step, value in history})


def test_the_page_lists_exactly_the_names_that_are_logged(expected):
    table = PAGE.read_text().partition("## Names")[2]
    named = set(re.findall(r"^\| `(\w+)`", table, flags=re.M))
    assert named == {*figures.FIGURES, *figures.COUNTS, *figures.TESTS, "step"}
