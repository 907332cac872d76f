"""`shoal split`: tables, files, and what it says about a wrong model."""

import json
import sys

import pytest

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
example_input = torch.randn(16, 6)


def make():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


if __name__ == "__main__":
    raise SystemExit("trained")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.pipelines.layer_costs.SECONDS", 0.0)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script's folder is put in front
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_model_of_a_script_with_its_files(shoal, script, tmp_path):
    page, figures = tmp_path / "split.html", tmp_path / "split.json"
    result = shoal(f"split {script}:model --stages 2 --report {page} --json {figures}")
    assert result.exit_code == 0, result.stderr
    assert "interleaved 1F1B" in result.stdout and "▒" in result.stdout
    assert result.stdout.count("json: ") == result.stdout.count("report: ") == 1
    record = json.loads(figures.read_text())
    assert [stage["layers"] for stage in record["stages"]] == [
        [str(i) for i in range(int(record["split_points"][0]))],
        [str(i) for i in range(int(record["split_points"][0]), 8)],
    ]
    told = page.read_text()
    assert told.count("<title>forward of microbatch") == 2 * 8 + 2 * 8 + 4 * 8  # two schedules, and 4 chunks
    assert "http" not in told.partition("<script>")[0].replace("http-equiv", "")


def test_a_function_that_makes_the_model_and_the_shape_of_a_batch(shoal, script):
    result = shoal(
        f"split {script}:make --stages 3 --input 12x3 --microbatches 6 --network 1gbit --memory 1GB"
    )
    assert result.exit_code == 0, result.stderr
    assert "A step of 6 microbatches on 3 devices" in result.stdout


@pytest.mark.slow
def test_a_task_with_an_optimizer_of_your_choice(shoal, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("shoal.pipelines.layer_costs.SECONDS", 0.0)
    result = shoal("split digits --stages 2 --batch 32 --optimizer adam")
    assert result.exit_code == 0, result.stderr
    assert "one microbatch of 4 samples" in result.stdout


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{script}:modle --input 4x6", "has no model 'modle'. Did you mean 'model'?"),
        ("{script}:SCRIPT_NAME", "has no model 'SCRIPT_NAME'"),
        ("{script}:example_input --stages 2", "example_input of {script} is a Tensor, not a model"),
        (
            "{script}:model --optimizer Adamm",
            "unknown optimizer 'Adamm' of torch.optim. Did you mean 'adam'?",
        ),
        ("{script}:model --input 16x7", "Sequential cannot compute a batch of shape 2x7"),
        ("{script}:model --microbatches 5", "a batch of 16 samples cannot be cut into 5 equal microbatches"),
    ],
)
def test_a_wrong_model_is_one_sentence_and_exit_code_2(shoal, script, line, sentence):
    result = shoal("split " + line.format(script=script))
    assert result.exit_code == 2
    assert sentence.format(script=script) in result.stderr
    assert result.stdout == ""
