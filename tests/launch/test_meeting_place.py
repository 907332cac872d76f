"""Processes on several hosts find each other, and the network interface between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed as dist

from forked import run_forked
from ports import free_port
from shoal.core.errors import Unavailable
from shoal.launch.meeting_place import GLOO_INTERFACE, _address_towards, _interface_of, choose_interface, meet

NODE = """
import os, sys, torch
from shoal.launch.meeting_place import choose_interface, meet

host, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = meet(host, port, rank, 60.0)
choose_interface(store, host, port, rank, 2, 60.0)
print(os.environ["GLOO_SOCKET_IFNAME"])
store.set(f"end {rank}", "")
store.wait(["end 0", "end 1"])
"""


LISTENER = """
import socket, sys
from shoal.launch.meeting_place import meet

port = int(sys.argv[1])
store = meet("127.0.0.1", port, 0, 5.0)
store.set("key", "value")
assert meet("127.0.0.1", port, 1, 5.0).get("key") == b"value"
with socket.create_server(("127.0.0.2", port)):  # an address of this host that the store left free
    print("free")
"""


@pytest.mark.slow
def test_the_store_listens_at_the_meeting_address_only():
    """In a process of its own: torch's store keeps a pipe open."""
    assert run_forked([sys.executable, "-c", LISTENER, str(free_port())]).stdout == "free\n"


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"meet at 127\.0\.0\.1:{port}: .* Set MASTER_PORT"):
            meet("127.0.0.1", port, 0, 1.0)


def test_on_one_host_the_interface_is_loopback(monkeypatch):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    monkeypatch.setattr("os.environ", dict(os.environ))
    choose_interface(dist.HashStore(), "127.0.0.1", 1, rank=0, nodes=1, timeout=1.0)
    assert os.environ[GLOO_INTERFACE] == "lo"


def test_an_interface_that_was_named_is_kept(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "ib0")
    choose_interface(dist.HashStore(), "nowhere.invalid", 1, rank=0, nodes=2, timeout=1.0)
    assert os.environ[GLOO_INTERFACE] == "ib0"


def test_an_address_leads_to_its_interface():
    assert _address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert _interface_of("127.0.0.1") == "lo"
    assert _interface_of("203.0.113.9") is None


HOSTS = tuple(f"shoal-meet-{os.getpid()}-{name}" for name in "ab")


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces with a cable between them: 10.93.7.1 on cable0, 10.93.7.2 on cable1."""
    ends = ("cable0", "cable1")
    lines = [
        *(f"ip netns add {host}" for host in HOSTS),
        f"ip link add {ends[0]} netns {HOSTS[0]} type veth peer name {ends[1]} netns {HOSTS[1]}",
        *(f"ip -n {host} addr add 10.93.7.{i}/24 dev {ends[i - 1]}" for i, host in enumerate(HOSTS, 1)),
        *(f"ip -n {host} link set {end} up" for host, end in zip(HOSTS, ends, strict=True)),
        *(f"ip -n {host} link set lo up" for host in HOSTS),
    ]
    try:
        for line in lines:
            made = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here, they need root: {line}: {made.stderr.strip()}")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/sbin/ip").exists() and not Path("/usr/sbin/ip").exists(),
    reason="ip not found; install with: apt-get install iproute2",
)
@pytest.mark.usefixtures("warm_programs")
def test_between_hosts_each_finds_the_interface_that_leads_to_the_other(two_hosts):
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-c", NODE, "10.93.7.1", "29611", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(HOSTS)
    ]
    assert [rank.communicate(timeout=100)[0].strip() for rank in ranks] == ["cable0", "cable1"]
