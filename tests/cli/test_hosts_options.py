"""The options of --hosts: what they mean together, and one sentence for what they cannot mean."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.hosts_options import read_hosts, read_variables


def read(hosts: str | None, transport: str | None = "grpc", access: tuple[str, ...] = (), **given: Any):
    names = ("workers", "servers_on", "port", "relay", "remote_python", "remote_folder", "ssh", "env")
    return read_hosts({**dict.fromkeys(names), "hosts": hosts, **given}, transport, access)


def test_without_hosts_there_are_none():
    assert read(None, None) is None


def test_everything_reaches_the_list_of_hosts(monkeypatch):
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.delenv("SHOAL_SHARED_MEMORY", raising=False)
    found = read(
        "a:2,b:1",
        workers=3,
        servers_on="b",
        port=50051,
        relay=True,
        remote_python="/opt/python",
        remote_folder="/data",
        ssh="ssh -F 'my file'",
        env=["X=1"],
    )
    assert found is not None and found.workers == 3
    assert (found.servers_on, found.port, found.python, found.folder) == ("b", 50051, "/opt/python", "/data")
    assert found.relayed
    assert found.ssh == ("ssh", "-F", "my file") and found.variables == {"X": "1"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"workers": 3}, "-n 3 does not fit --hosts a:2,b:2, which has 4; omit -n"),
        ({"transport": "processes"}, "'processes' is one host; with --hosts take 'grpc'"),
        ({"transport": "mpi"}, "joins the processes that mpiexec has started"),
        ({"transport": "carrier-pigeon"}, "carrier-pigeon"),
        ({"transport": "gloo", "port": 5}, "--port belongs to transport 'grpc'"),
        ({"transport": "gloo", "relay": True}, "--relay belongs to transport 'grpc'"),
        ({"servers_on": "c"}, "--servers-on c: --hosts names no such host"),
        ({"access": ("token_file",)}, "--token-file does not go with --hosts"),
        ({"env": ["NOT SET"]}, "write it as NAME or NAME=VALUE"),
        ({"env": ["SHOAL_NOT_SET_ANYWHERE"]}, "it is not set here"),
    ],
)
def test_what_does_not_fit_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        read("a:2,b:2", **given)


def test_options_of_hosts_need_hosts():
    with pytest.raises(ValueError, match="--remote-python belongs to --hosts"):
        read(None, None, remote_python="/opt/python")


def test_variables_have_the_value_here_unless_another_is_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_DATA", "data")
    monkeypatch.setenv("HERE", "1")
    monkeypatch.delenv("SHOAL_SHARED_MEMORY", raising=False)
    found = read_variables(["HERE", "THERE=a=b"])
    assert found == {"SHOAL_DATA": str(tmp_path / "data"), "HERE": "1", "THERE": "a=b"}
