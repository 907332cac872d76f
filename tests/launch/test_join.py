"""Joining a run: nobody is waited for longer than was said, and addresses are read as people write them."""

from __future__ import annotations

import socket
import time

import pytest
from torch import distributed as dist

from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.transport import LOST
from shoal.launch import join
from shoal.launch.drive import drive
from shoal.launch.join import Access, connect
from shoal.transports.grpc import GrpcTransport
from shoal.transports.grpc.security import split_address, with_port


def test_a_server_that_was_started_again_goes_on_without_a_worker_that_is_frozen(monkeypatch):
    monkeypatch.setattr(join, "REJOIN_SECONDS", 0.2)
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # it takes calls, and says nothing
        store.set("shoal/token", "00" * 32)
        store.set("shoal/addr/0", f"127.0.0.1 {frozen.getsockname()[1]}")
        began = time.monotonic()
        transport = connect(
            "processes", NodeIdentity(1, 1, servers=1, incarnation=1), store, vector_bytes=8, timeout=60.0
        )
    assert time.monotonic() - began < 2.0
    assert drive(transport.recv(1.0)).tag == LOST
    assert transport.timeout == 60.0  # a line that is up has all the time that was asked for
    drive(transport.close())


def test_a_worker_0_that_never_comes_is_waited_for_as_long_as_was_said():
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"node 0 did not come to the meeting point within 0.2 s"):
        connect("grpc", NodeIdentity(1, 1, servers=1), dist.HashStore(), vector_bytes=8, timeout=0.2)
    assert time.monotonic() - began < 2.0


ADDRESSES = {
    "127.0.0.1": ("127.0.0.1", 0),
    "127.0.0.1:50051": ("127.0.0.1", 50051),
    "::1": ("::1", 0),
    "::": ("::", 0),
    "[::1]": ("::1", 0),
    "[::1]:50051": ("::1", 50051),
    "fe80::1:2": ("fe80::1:2", 0),
    "host": ("host", 0),
    "host.example:50051": ("host.example", 50051),
}


@pytest.mark.parametrize(("written", "meant"), ADDRESSES.items())
def test_an_address_may_lack_its_port(written, meant):
    assert split_address(with_port(written)) == meant


@pytest.mark.parametrize("written", ["::1", "fe80::1:2", "host", "[::1]", ":50051", "host:", "host:x"])
def test_an_address_without_a_port_is_no_whole_one(written):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(written)


def test_a_server_listens_where_it_is_told(monkeypatch):
    monkeypatch.setattr(GrpcTransport, "connect", lambda *_, listen, **options: listen)
    given = Access(listen="::1")
    bound = connect("grpc", NodeIdentity(0, 2), dist.HashStore(), vector_bytes=8, timeout=5.0, access=given)
    assert bound == "[::1]:0"
