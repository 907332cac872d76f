"""What is wrong with a command line is said in one sentence, before anything is run."""

from __future__ import annotations

import pytest

from shoal.cli import comparison
from shoal.cli.command import explain, take
from shoal.core.errors import Interrupted, PeerLost, WorkerFailed


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def refuse(**_):
        raise AssertionError("a run was started although an argument is wrong")

    monkeypatch.setattr(comparison, "run", refuse)


WRONG = {
    "unknown strategy": ("compare --strategies sync,bmfu", "unknown strategy 'bmfu'. Did you mean 'bmuf'?"),
    "no strategy": ("compare --strategies ,", "--strategies names none"),
    "twice": ("compare --strategies sync,sync", "names 'sync' twice"),
    "option of none": (
        "compare --strategies local,bmuf --strategy.perod 8",
        "none of local, bmuf has an option 'perod'. Did you mean 'period'?",
    ),
    "bad option": (
        "compare --strategies bmuf --strategy.period 0",
        "strategy 'bmuf': period=0 must be at least 1",
    ),
    "option is no number": (
        "compare --strategies bmuf --strategy.period=x",
        "period='x' should be a whole number",
    ),
    "option without value": ("compare --strategy.period --sim", "--strategy.period needs a value"),
    "balance with a server": (
        "compare --strategies sync,asgd --balance",
        "those of 'asgd' each go at a speed of their own",
    ),
    "balance of a script": ("run --balance train.py", "a script's loop owns its loader"),
    "unknown task": ("compare --task digit", "unknown task 'digit'. Did you mean 'digits'?"),
    "unknown codec": ("compare --codec fp61", "unknown codec 'fp61'. Did you mean 'fp16'?"),
    "unknown transport": ("compare --transport gloop", "unknown transport 'gloop'. Did you mean 'gloo'?"),
    "unknown collective": ("compare --collective rings", "unknown collective 'rings'. Did you mean 'ring'?"),
    "lossy": ("compare --collective tree --codec fp16", "FP16() is not exact; take 'stripes'"),
    "native": ("compare --collective native", "collective 'native' needs transport 'gloo' and no codec"),
    "no worker": ("compare -n 0", "--workers 0: a run needs at least 1 worker"),
    "no worker, single": ("compare -n 0 --strategies single", "--workers 0: a run needs at least 1 worker"),
    "no epoch": ("compare --epochs 0", "--epochs 0: a run needs at least 1 epoch"),
    "no batch": ("compare --batch 0", "--batch 0: a batch holds at least 1 sample"),
    "bad rate": ("compare --lr 0", "--lr 0: the learning rate must be positive"),
    "bad network": ("compare --sim --network 1Gbot", "'1Gbot' in network '1Gbot' has no known unit"),
    "bad compute": ("compare --sim --compute fast", "'fast' is not a number with a unit"),
    "network of a real run": ("compare --network 1Gbit", "--network describes virtual time; add --sim"),
    "every without folder": ("compare --every 5", "add --checkpoint DIR"),
    "every 0": ("compare --every 0 --checkpoint {tmp}/c", "'--every'"),
    "timeout 0": ("compare --timeout 0", "'--timeout'"),
    "json is a folder": ("compare --json {tmp}", "is a folder; name a file in it"),
    "json below a file": ("compare --json {tmp}/file/out.json", "file is not a folder"),
    "report below a file": ("compare --report {tmp}/file/out.html", "file is not a folder"),
    "checkpoint in a file": ("compare --checkpoint {tmp}/file", "file is not a folder"),
    "unknown option": ("compare --epohcs 3", "No such option: --epohcs"),
    "unknown command": ("comapre", "Did you mean 'compare'?"),
    "unknown kind": ("list tsaks", "Did you mean 'tasks'?"),
    "no script": ("run -n 2", "name the script to run"),
    "missing script": ("run -n 2 nowhere.py", "there is no script 'nowhere.py'"),
    "script of no worker": ("run -n 0 {tmp}/file", "-n 0: a run needs at least 1 worker"),
    "script, unknown strategy": ("run {tmp}/file --strategy esagd", "Did you mean 'easgd'?"),
    "script, unknown option": (
        "run {tmp}/file --strategy easgd --strategy.perod 3",
        "Did you mean 'period'?",
    ),
    "script, option of nothing": ("run --strategy.period 3 {tmp}/file", "name it with --strategy"),
    "script, too many": ("run -n 2 {tmp}/file --strategy single", "Single runs on 1 worker, not on 2"),
    "script in virtual time": ("run --transport sim {tmp}/file", "unknown transport 'sim'"),
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
