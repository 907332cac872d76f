"""Workers of a user's own loop with a server are killed: they come back, and every sample counts once."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.core.errors import WorkerFailed

run_loop = partial(run_a_script, script=Path(__file__).with_name("mortal_loop.py"), workers=3)
pytestmark = [pytest.mark.usefixtures("warm_scripts"), pytest.mark.slow, pytest.mark.timeout(120)]

SAMPLES, EPOCHS = 60, 4


def counts(*words, folder, strategy="asgd", **place):
    """How often each sample is in the model in which all end, and what the workers printed."""
    waits = ["--epochs", str(EPOCHS), "--returns", str(folder)]
    printed = run_loop(*waits, *words, strategy=strategy, **place)
    found = [final_weights(lines) for lines in printed if "weights" in lines]
    assert all(torch.equal(own, found[0]) for own in found)
    assert sum("is first" in lines for lines in printed) == 1
    return found[0], printed


@pytest.mark.parametrize(
    ("words", "strategy"),
    mostly_soak(
        [
            (["--kill", "1:3", "0:6", "--accumulate", "2", "--frozen"], "asgd"),
            (["--kill", "1:4"], "hogwild"),
            (["--kill", "0:4", "1:4", "2:4"], "asgd"),
            (["--kill", "1:end"], "asgd"),
            (["--kill", "0:end"], "asgd"),
            (["--kill", "1:7", "--data", "stream"], "asgd"),
            (["--kill", "1:8"], "ssp"),
            (["--kill", "1:7"], "downpour"),
        ],
        few=1,
    ),
)
def test_every_sample_counts_once_an_epoch_whoever_is_killed(words, strategy, tmp_path):
    found, printed = counts(*words, folder=tmp_path, strategy=strategy)
    assert torch.equal(found, torch.full((SAMPLES,), float(EPOCHS)))
    kills = len([word for word in words if ":" in word])
    assert sum("goes on from" in lines for lines in printed) == kills
    frozen = {line for lines in printed for line in lines.splitlines() if line.startswith("frozen")}
    assert len(frozen) == ("--frozen" in words)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["grpc", "gloo"])
def test_over_others_with_two_shards_they_come_back_too(transport, tmp_path):
    found, printed = counts("--kill", "1:4", folder=tmp_path, transport=transport, servers=2)
    assert torch.equal(found, torch.full((SAMPLES,), float(EPOCHS)))
    assert "goes on from 4" in printed[1]


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    [
        "sync_server",
        "softsync",
        "dcasgd",
        "staleness_aware",
        "easgd",
        "async_diloco",
        "decoupled_diloco",
        "hierarchical",
        "halos",
    ],
)
def test_under_every_strategy_they_come_back_and_all_end_with_one_model(strategy, tmp_path):
    found, printed = counts("--kill", "1:4", folder=tmp_path, strategy=strategy)
    assert found.isfinite().all()
    assert "goes on from" in printed[1]
    assert all("weights" in lines for lines in printed)


@pytest.mark.soak
def test_the_others_do_not_wait_for_ever_for_one_that_always_dies(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        found, printed = counts("--kill", "1:3", "--again", folder=tmp_path)
    assert "weights" not in printed[1]
    assert found.sum() == EPOCHS * SAMPLES - (EPOCHS * SAMPLES // 3 - 3 * 4)
    assert "nobody has done what was left of the data of worker 1 from its step 3 on" in caplog.text


@pytest.mark.parametrize("rank", mostly_soak([0, 1], few=1))
def test_a_loop_that_would_begin_anew_leaves_and_the_others_go_on(rank, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        _, printed = counts("--kill", f"{rank}:3", "--data", "own", folder=tmp_path)
    assert "weights" not in printed[rank]
    assert f"worker {rank} was started again at step 3 and leaves" in caplog.text


@pytest.mark.soak
def test_a_loop_that_leaves_its_passes_early_leaves_and_the_others_go_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        _, printed = counts("--kill", "1:5", "--most", "3", folder=tmp_path)
    assert "weights" not in printed[1]
    assert "nobody knows which batches it has done" in caplog.text


@pytest.mark.soak
def test_after_a_return_checkpoints_are_saved_as_before(tmp_path):
    saves = {"checkpoint": str(tmp_path / "saved"), "every": 2}
    waits = tmp_path / "waits"
    waits.mkdir()
    with pytest.raises(WorkerFailed, match="exit code 9"):
        counts("--kill", "1:3", "--stop-after", "11", folder=waits, **saves)
    steps = [int(folder.name.split("-")[-1]) for folder in (tmp_path / "saved").glob("step-*")]
    assert max(steps) > 4
    found, _ = counts(folder=waits, **saves)
    assert torch.equal(found, torch.full((SAMPLES,), float(EPOCHS)))
