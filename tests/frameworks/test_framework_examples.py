"""The examples of the docs, on one worker and on two: both learn, and the second as the docs say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from framework_runs import needs

from forked import run_forked
from scripts import run_loop

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_scripts"), needs("sklearn", "digits")]


@pytest.mark.parametrize(
    ("example", "least"),
    [
        pytest.param("digits_lightning", 90.0, marks=needs("lightning", "lightning")),
        pytest.param("digits_fabric", 90.0, marks=needs("lightning", "lightning")),
        pytest.param("digits_accelerate", 90.0, marks=needs("accelerate", "accelerate")),
        pytest.param("words_huggingface", 60.0, marks=needs("transformers", "huggingface")),
    ],
)
def test_an_example_learns_with_shoal_as_without(example, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = run_forked([sys.executable, str(EXAMPLES / f"{example}.py")])
    printed = run_loop(script=EXAMPLES / f"{example}_shoal.py", strategy=None)
    for text in (plain.stdout, printed[0]):
        found = re.search(r"test accuracy (\d+\.\d+) %", text)
        assert found, (text, plain.stderr)
        assert float(found[1]) >= least
