"""Workers of a user's own loop among neighbours are killed: they come back and do the rest of their share."""

from __future__ import annotations

import logging
from collections import Counter
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

SAMPLES, EPOCHS, BATCH = 60, 4, 4
IN_ROUNDS = ("dpsgd", "sgp", "choco", "gossipgrad")
"""Their workers hear of every step of a neighbour; under the others the last steps may be news to all."""


def steps_of(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line.startswith("read ")]


def reads(printed: list[str]) -> Counter[int]:
    """How often each sample was in a step that was done, by whichever incarnation."""
    told = [line for lines in printed for line in steps_of(lines)]
    return Counter(int(word) for line in told for word in line[6:-1].split(","))


def run(*words, folder, strategy="gossip", **place):
    waits = ["--epochs", str(EPOCHS), "--returns", str(folder), "--tell"]
    return run_loop(*waits, *words, strategy=strategy, **place)


def check_shares(printed: list[str], repeated: int) -> None:
    """Every sample was read once an epoch, but for the last steps of those that were killed, done again."""
    counts = reads(printed)
    assert all(counts[sample] >= EPOCHS for sample in range(SAMPLES))
    assert sum(counts.values()) - EPOCHS * SAMPLES <= repeated


@pytest.mark.parametrize(
    ("words", "strategy"),
    mostly_soak(
        [
            (["--kill", "1:4", "--frozen"], "dpsgd"),
            (["--kill", "1:4"], "gossip"),
            (["--kill", "0:3"], "adpsgd"),
            (["--kill", "2:5"], "sgp"),
            (["--kill", "1:4"], "choco"),
            (["--kill", "1:4"], "gossipgrad"),
            (["--kill", "1:4"], "noloco"),
            (["--kill", "1:4"], "strom"),
            (["--kill", "1:3", "2:9"], "dpsgd"),
            (["--kill", "1:4", "--data", "stream"], "gossip"),
            (["--kill", "1:4", "--accumulate", "2", "--samples", "48"], "dpsgd"),
        ],
        few=2,
    ),
)
def test_a_killed_worker_comes_back_and_does_the_rest_of_its_share(words, strategy, tmp_path):
    printed = run(*words, folder=tmp_path, strategy=strategy)
    kills = [word for word in words if ":" in word]
    assert sum("goes on from" in lines for lines in printed) == len(kills)
    found = [final_weights(lines) for lines in printed]
    assert all(own.equal(found[0]) for own in found)
    assert torch.isfinite(found[0]).all()
    if "--samples" not in words:
        unheard = 1 if strategy in IN_ROUNDS else sum(int(word.split(":")[1]) for word in kills)
        check_shares(printed, repeated=BATCH * len(kills) * unheard)
    frozen = {line for lines in printed for line in lines.splitlines() if line.startswith("frozen")}
    assert len(frozen) == ("--frozen" in words)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["dpsgd", "gossip"])
def test_a_worker_that_has_read_more_than_its_steps_goes_on_where_it_was(strategy, tmp_path):
    """It leaves its first batch out, which nobody else does."""
    printed = run("--uneven", "1", "--kill", "1:5", folder=tmp_path, strategy=strategy)
    assert "goes on from" in printed[1]
    counts = reads(printed)
    assert sum(count < EPOCHS for count in counts.values()) <= BATCH
    unheard = 1 if strategy in IN_ROUNDS else 5
    assert -BATCH <= sum(counts.values()) - EPOCHS * SAMPLES <= BATCH * unheard - BATCH


@pytest.mark.soak
def test_where_the_script_names_the_strategy_they_come_back_too(tmp_path):
    printed = run("--strategy-in-code", "dpsgd", "--kill", "1:4", folder=tmp_path, strategy=None)
    assert "goes on from" in printed[1]
    check_shares(printed, repeated=BATCH)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["dpsgd", "gossip"])
def test_a_checkpoint_after_a_return_resumes_with_every_worker_at_its_own_place(strategy, tmp_path):
    saves, waits = {"checkpoint": str(tmp_path / "saved"), "every": 1}, tmp_path / "waits"
    waits.mkdir()
    with pytest.raises(WorkerFailed, match="exit code 9"):
        run("--kill", "1:3", "--stop-after", "12", folder=waits, strategy=strategy, **saves)
    saved = [int(folder.name.split("-")[-1]) for folder in (tmp_path / "saved").glob("step-*")]
    assert len(saved) < 9  # older ones are removed
    whole = run("--pause", "0", folder=tmp_path, strategy=strategy)
    resumed = run("--pause", "0", folder=tmp_path, strategy=strategy, **saves)
    for all_read, read in zip(map(steps_of, whole), map(steps_of, resumed), strict=True):
        assert all_read[len(all_read) - len(read) :] == read
    first, second, third = (len(steps_of(lines)) for lines in resumed)
    assert first == third <= 4 * EPOCHS
    assert (second > first) == (strategy in IN_ROUNDS)  # whose worker was some rounds ahead of its share


def test_a_loop_that_would_begin_anew_leaves_and_the_others_go_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run("--kill", "1:3", "--data", "own", folder=tmp_path)
    assert "weights" not in printed[1]
    assert "worker 1 was started again at step 3 and leaves" in caplog.text


@pytest.mark.parametrize(
    ("transport", "victim", "strategy"),
    mostly_soak(
        [
            ("grpc", 0, "dpsgd"),
            ("gloo", 1, "gossip"),
            ("grpc", 1, "gossip"),
            ("grpc", 2, "sgp"),
            ("gloo", 0, "dpsgd"),
        ],
        few=1,
    ),
)
def test_over_other_transports_it_comes_back_too(transport, victim, strategy, tmp_path):
    printed = run("--kill", f"{victim}:4", folder=tmp_path, strategy=strategy, transport=transport)
    assert "goes on from" in printed[victim]
    found = [final_weights(lines) for lines in printed]
    assert all(own.equal(found[0]) for own in found)
    check_shares(printed, repeated=BATCH * (1 if strategy in IN_ROUNDS else 4))
