"""In a store that every user of the host can read there is nothing that admits a node."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from torch import distributed as dist

from shoal.core.errors import PeerLost, ShoalError
from shoal.core.identity import NodeIdentity
from shoal.launch import join
from shoal.launch.drive import drive
from shoal.launch.join import Access, connect
from shoal.launch.recovery import message_limit
from shoal.launch.run_token import run_token
from shoal.transports.grpc import GrpcTransport, Security

pytestmark = pytest.mark.usefixtures("grpc_core")


def connect_two(store, **options):
    """Two nodes that find each other in a store."""
    found = {}

    def join_as(rank):
        me = NodeIdentity(rank, 2)
        found[rank] = connect("grpc", me, store, vector_bytes=8, timeout=20.0, manifest="m", **options)

    other = threading.Thread(target=join_as, args=[1])
    other.start()
    join_as(0)
    other.join()
    return [found[0], found[1]]


def close(nodes):
    closers = [threading.Thread(target=lambda node=node: drive(node.close())) for node in nodes]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


@pytest.mark.slow
def test_what_a_public_store_holds_admits_nobody():
    store = dist.HashStore()
    nodes = connect_two(store, store_is_public=True)
    try:
        token = Path(store.get("shoal/token").decode())
        assert not token.exists() and not token.parent.exists()  # all are there: nobody needs it any more
        with pytest.raises(PeerLost, match="refused node 1: not admitted"):
            GrpcTransport.connect(
                1,
                2,
                hubs=(0,),
                run_id=store.get(join.RUN_KEY).decode(),  # which was the password
                manifest="m",
                limit_bytes=message_limit(8),
                security=Security(),
                store=store,
                timeout=20.0,
            )
    finally:
        close(nodes)


def test_the_file_with_the_token_is_this_user_s_alone():
    store = dist.HashStore()
    with run_token(store, 0, 1.0) as path:
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        assert len(Path(path).read_text()) == 64
        with run_token(store, 1, 1.0) as same:
            assert same == path


def test_a_token_that_somebody_else_has_put_there_is_refused(tmp_path, monkeypatch):
    store = dist.HashStore()
    (tmp_path / "token").write_text("00" * 32)
    store.set("shoal/token", str(tmp_path / "token"))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ShoalError, match="is not a file of this user"), run_token(store, 1, 1.0):
        pytest.fail("its writer knows the token")
    store.set("shoal/token", str(tmp_path / "nowhere"))
    with pytest.raises(ShoalError, match="cannot read the token of its run"), run_token(store, 1, 1.0):
        pytest.fail("there is no token")


@pytest.mark.slow
def test_a_run_that_other_hosts_can_join_without_a_token_begins_with_a_warning(caplog):
    open_to_all = Access(listen="0.0.0.0", advertise="127.0.0.1", insecure=True)
    close(connect_two(dist.HashStore(), store_is_public=True, access=open_to_all))
    assert [r.getMessage() for r in caplog.records] == [
        "gRPC has no token: whoever reaches the rendezvous store can join this run"
    ]
