"""--hosts: what it names, where nodes are placed, and one sentence for everything it cannot mean."""

import socket
import subprocess

import pytest

from shoal.launch import hosts as module
from shoal.launch.hosts import Host, HostList, parse_hosts, real_name


def test_names_users_and_addresses_are_read():
    assert parse_hosts("a:4, me@b:2,c=10.0.0.3:1") == (
        Host("a", 4),
        Host("me@b", 2),
        Host("c", 1, "10.0.0.3"),
    )
    assert parse_hosts("[fd00::1]:4,b=[fd00::2]:4") == (Host("fd00::1", 4), Host("b", 4, "fd00::2"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a", "'a' has no number of workers"),
        ("a:four", "'a:four' has no number of workers"),
        ("a:²", "no number of workers"),
        ("a:4,", "'' has no number of workers"),
        ("a:0", "a:0: a host needs at least 1 worker"),
        (":4", "':4' is not a host"),
        ("-oProxyCommand=x:4", "is not a host"),
        ("a b:4", "is not a host"),
        ("a:22:4", "too many colons"),
        ("a=:4", "no address after '='"),
        ("a:4,b:2,a:1", "names 'a' twice"),
    ],
)
def test_everything_else_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        parse_hosts(text)
    assert "\n" not in str(refused.value)


def test_workers_are_counted_through_the_hosts_and_servers_come_last():
    two = HostList(parse_hosts("a:1,b:2"))
    assert two.workers == 3
    assert two.place_nodes(5) == [0, 1, 1, 0, 0]
    assert HostList(two.hosts, servers_on="b").place_nodes(4) == [0, 1, 1, 1]
    assert str(two) == "a:1,b:2"
    with pytest.raises(ValueError, match="--servers-on c: --hosts names no such host, but a, b"):
        HostList(two.hosts, servers_on="c")


@pytest.fixture
def names(monkeypatch):
    """A name service of our own."""
    known = {"a": "10.0.0.1", "b": "10.0.0.2", "alias-of-b": "10.0.0.2", "here": "127.0.1.1"}

    def look_up(name, port, **options):
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6, 1, 6, "", ("fd00::9", 0, 0, 0)),
            (socket.AF_INET, 1, 6, "", (known[name], 0)),
        ]

    monkeypatch.setattr(module.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(module, "real_name", lambda ssh, name: name)


def test_every_host_gets_the_address_of_its_name(names):
    resolved = HostList(parse_hosts("a:4,b:4")).resolve()
    assert [host.address for host in resolved.hosts] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:4,nowhere:4", r"'nowhere' has no address .*; write nowhere=ADDRESS:WORKERS"),
        ("a:4,here:4", r"'here' has the address 127.0.1.1, at which other hosts cannot reach it"),
        ("b:4,alias-of-b:4", r"names 10.0.0.2 twice, as 'b' and 'alias-of-b'"),
    ],
)
def test_a_host_that_others_cannot_reach_is_refused(names, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        HostList(parse_hosts(text)).resolve()


def test_one_host_may_be_this_one(names):
    assert HostList(parse_hosts("here:2")).resolve().hosts == (Host("here", 2, "127.0.1.1"),)


def test_the_name_in_ssh_s_configuration_counts(monkeypatch):
    def answer(words, **options):
        assert words == ["ssh", "-F", "file", "-G", "me@alias"]
        return subprocess.CompletedProcess(words, 0, "user me\nhostname real.example\nport 22\n", "")

    monkeypatch.setattr(module.subprocess, "run", answer)
    assert real_name(["ssh", "-F", "file"], "me@alias") == "real.example"


def test_without_an_answer_of_ssh_the_name_itself_counts():
    assert real_name(["no-such-program"], "me@alias") == "alias"
