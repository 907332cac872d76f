"""What `shoal join` and --max-workers refuse, each in one sentence, before anything starts."""

from __future__ import annotations

import pytest

from shoal.cli import join_progress
from shoal.core.errors import Unavailable


def sentence_of(result) -> str:
    assert result.stdout == ""
    assert result.stderr.startswith("shoal: ")
    return result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("join", "name the run to join, as in: shoal join 10.0.0.1:7000 --token-file token"),
        ("join 10.0.0.1:7000 nowhere.py --epochs 3", "there is no script 'nowhere.py'"),
        (f"join 10.0.0.1:7000 --threads 2 {__file__}", "a script may call torch.set_num_threads itself"),
        ("join 10.0.0.1:7000 --token secret", "--token would show the token to everybody"),
        ("join nowhere", "address 'nowhere' is not host:port"),
        ("join 127.0.0.1:7000", "a run is joined with its token"),
        ("compare --max-workers 8", "others join over gRPC; add --transport grpc"),
        ("compare --transport grpc --listen 10.0.0.1", "add --max-workers"),
        ("compare --listen 10.0.0.1", "--listen belongs to --transport grpc"),
        ("compare --transport grpc --max-workers 8 --strategies asgd", "nobody can join workers of 'asgd'"),
        ("compare --transport grpc --max-workers 2 --strategies sync", "4 workers begin"),
        (f"run --max-workers 8 --strategy asgd {__file__}", "nobody can join workers of 'asgd' here"),
        (f"run --max-workers 8 --transport gloo {__file__}", "and not over 'gloo'; take transport 'grpc'"),
        (
            f"run --max-workers 8 --checkpoint kept {__file__}",
            "--checkpoint and --max-workers: a script's",
        ),
        (f"run -n 2 --max-workers 8 --group 2 {__file__}", "without --hosts, --on and --group"),
    ],
)
def test_what_cannot_be_is_refused(shoal, monkeypatch, line, sentence):
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    result = shoal(line)
    assert result.exit_code == 2
    assert sentence in sentence_of(result)


def test_nobody_at_that_address_is_a_runtime_failure(shoal, monkeypatch):
    monkeypatch.setenv("SHOAL_TOKEN", "t" * 32)
    result = shoal("join 127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1: nobody answers there; is the run over, or the address wrong?" in sentence_of(result)


def test_options_stand_on_both_sides_of_the_address_and_end_at_the_script(monkeypatch, shoal):
    called = []
    monkeypatch.setattr(join_progress, "take_part", lambda *words: called.append(words))
    for line in (
        f"join 10.0.0.1:7000 --insecure {__file__} --epochs 3",
        f"join --insecure 10.0.0.1:7000 {__file__} --epochs 3",
    ):
        assert shoal(line).exit_code == 0
    assert called == [("10.0.0.1:7000", {"insecure": True}, [__file__, "--epochs", "3"], None, False)] * 2
    assert shoal("join --insecure 10.0.0.1:7000 --quiet").exit_code == 0
    assert called[-1] == ("10.0.0.1:7000", {"insecure": True}, [], None, True)


@pytest.mark.parametrize(
    ("granted", "script", "why"),
    [
        ({"script": {"name": "train.py"}}, [], "this is the run of the script 'train.py'; add it"),
        ({"plan": {"task": "digits"}}, ["train.py"], "the run of task 'digits'.* leave 'train.py' out"),
    ],
)
def test_a_script_is_named_for_the_run_of_a_script_alone(granted, script, why):
    with pytest.raises(Unavailable, match=why):
        join_progress.check_kind(granted, script)
