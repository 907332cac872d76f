"""What `shoal join` and --max-workers refuse, each in one sentence, before anything starts."""

from __future__ import annotations

import pytest


def sentence_of(result) -> str:
    assert result.stdout == ""
    assert result.stderr.startswith("shoal: ")
    return result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("join", "name the run to join, as in: shoal join 10.0.0.1:7000 --token-file token"),
        ("join 10.0.0.1:7000 train.py", "'train.py' follows the address"),
        ("join 10.0.0.1:7000 --token secret", "--token would show the token to everybody"),
        ("join nowhere", "address 'nowhere' is not host:port"),
        ("join 127.0.0.1:7000", "a run is joined with its token"),
        ("compare --max-workers 8", "others join over gRPC; add --transport grpc"),
        ("compare --transport grpc --listen 10.0.0.1", "add --max-workers"),
        ("compare --listen 10.0.0.1", "--listen belongs to --transport grpc"),
        ("compare --transport grpc --max-workers 8 --strategies asgd", "nobody can join workers of 'asgd'"),
        ("compare --transport grpc --max-workers 2 --strategies sync", "4 workers begin"),
        ("run --max-workers 8 train.py", "nobody can join a script's run from another machine"),
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
