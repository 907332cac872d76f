"""A wrong command line is answered in one sentence before anything is run."""

from __future__ import annotations

import subprocess

import pytest

from shoal.cli import comparison
from shoal.cli.command import explain, take
from shoal.core.errors import Interrupted, PeerLost, WorkerFailed


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a run was started although an argument is wrong")

    monkeypatch.setattr(comparison, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


WRONG = {  # what only the classes themselves can tell; the rest is in test_quick_answers.py
    "balance with a server": (
        "compare --strategies sync,asgd --balance",
        "the workers of 'asgd' each go at their own speed",
    ),
    "lossy": ("compare --collective tree --codec fp16", "FP16() is not exact; take 'stripes'"),
    "native": ("compare --collective native", "collective 'native' needs transport 'gloo' and no codec"),
    "codec that is not used": ("compare --strategies gossip --codec fp16", "so FP16() would do nothing"),
    "range of a codec": (
        "compare --codec low_rank:rank=0",
        "codec 'low_rank': rank=0: P and Q have at least",
    ),
    "word of an option": (
        "compare --strategies bmuf --strategy.variant mine",
        "strategy 'bmuf': variant='mine' must be one of paper, cntk",
    ),
    "script, too many": ("run -n 2 {tmp}/file --strategy single", "Single runs on 1 worker, not on 2"),
    "script, servers of none": ("run --servers 2 {tmp}/file --strategy sync", "and 'sync' has none"),
    "script, codec that is not used": (
        "run {tmp}/file --strategy gossip --codec fp16",
        "so FP16() would do nothing",
    ),
    "script, mpi without mpiexec": (
        "run --transport mpi {tmp}/file",
        "transport 'mpi' joins the processes that mpiexec has started",
    ),
}


@pytest.mark.parametrize(("line", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(shoal, tmp_path, line, sentence):
    (tmp_path / "file").touch()
    result = shoal(line.format(tmp=tmp_path))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("shoal: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_options_are_taken_out_in_both_spellings():
    taken, rest = take(
        ["-n", "4", "--a.x", "8", "--a.y=-1", "--b", "c"], lambda name: name.startswith("--a.")
    )
    assert taken == [("--a.x", "8"), ("--a.y", "-1")]
    assert rest == ["-n", "4", "--b", "c"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no"), 2), (TypeError("no"), 2), (PeerLost("no"), 1), (Interrupted("no"), 130)],
)
def test_each_kind_of_error_has_its_exit_code(capsys, error, code):
    assert explain(error) == code
    assert capsys.readouterr().err == "shoal: no\n"


def test_a_failed_worker_shows_its_traceback_once_and_then_the_sentence(capsys):
    assert explain(WorkerFailed("worker 1 failed: boom", "Traceback (most recent call last):\n  here\n")) == 1
    assert (
        capsys.readouterr().err
        == "Traceback (most recent call last):\n  here\nshoal: worker 1 failed: boom\n"
    )


def test_an_os_error_names_the_file(capsys):
    assert explain(FileNotFoundError(2, "No such file or directory", "data.bin")) == 1
    assert capsys.readouterr().err == "shoal: No such file or directory: data.bin\n"


def test_what_nobody_foresaw_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        explain(ZeroDivisionError())


def test_help_comes_without_arguments(shoal):
    result = shoal("")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("compare", "run", "list", "doctor"))


def test_version(shoal):
    assert shoal("--version").stdout == "shoal 0.1.0\n"


@pytest.mark.slow
def test_more_workers_than_samples_are_noticed_before_the_first_run(shoal):
    result = shoal("compare --strategies single,sync -n 2000")
    assert result.exit_code == 2
    assert "1437 samples cannot be shared among 2000 workers" in result.stderr
