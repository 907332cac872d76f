"""Parcels: large messages lie in shared memory, which is bounded, used again and given back."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from harness import drive, in_threads, is_shared, open_files, sockets_mesh
from torch import Tensor

from shoal.core.transport import LOST, Message
from shoal.transports import frames
from shoal.transports.frames import COPY, LARGE_MESSAGE, SHARED_READ, WINDOW, MemoryLocation
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.large_messages import (
    IDLE_SENDS,
    MOST_BUFFERS,
    SMALLEST_SHARED,
    SendBuffers,
    largest,
)
from shoal.transports.shared_memory.memory import SharedMemory
from shoal.transports.sockets import SocketTransport, connections

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")

PATIENCE = 10.0
LARGE = SMALLEST_SHARED // 4


def exchange(a: SocketTransport, b: SocketTransport, *parts: Tensor) -> Message:
    drive(a.send(b.rank, Message("parcel", parts)))
    return drive(b.recv(PATIENCE))


def send_buffers(t: SocketTransport, peer: int) -> SendBuffers:
    box = t._connections[peer].send_buffers
    assert box is not None
    return box


def test_large_parts_arrive_as_views_on_shared_memory_and_small_ones_do_not() -> None:
    with sockets_mesh(2) as (a, b):
        x = torch.randn(LARGE)
        got = exchange(a, b, x).body
        assert torch.equal(got, x)
        assert is_shared(got)
        got.zero_()  # it is the receiver's own to change
        assert not is_shared(exchange(a, b, torch.ones(LARGE - 1)).body)


def test_parts_count_together() -> None:
    with sockets_mesh(2) as (a, b):
        sent = (torch.arange(7), torch.empty(0), torch.randn(LARGE), torch.ones(3, dtype=torch.uint8))
        got = exchange(a, b, *sent).parts
        assert all(torch.equal(x, y) for x, y in zip(got, sent, strict=True))
        assert all(is_shared(part) for part in got if part.numel())


def test_a_buffer_is_used_again_once_the_receiver_has_no_more_use_for_it() -> None:
    with sockets_mesh(2) as (a, b):
        files = 0
        for i in range(100):
            assert exchange(a, b, torch.full((LARGE,), float(i))).body[-1] == i
            files = files or open_files()
        assert len(send_buffers(a, 1)._buffers) == 1
        assert open_files() == files


def test_a_slice_keeps_its_buffer_when_the_tensor_is_gone() -> None:
    with sockets_mesh(2) as (a, b):
        kept = exchange(a, b, torch.ones(LARGE)).body[10:20]
        for _ in range(5):
            assert exchange(a, b, torch.full((LARGE,), 2.0)).body[0] == 2
        assert kept.tolist() == [1.0] * 10
        assert len(send_buffers(a, 1)._buffers) == 2


def test_a_slow_receiver_gets_the_rest_through_the_socket() -> None:
    """The sender neither waits for it nor takes more and more memory."""
    with sockets_mesh(2) as (a, b):
        for i in range(2 * MOST_BUFFERS):
            drive(a.send(1, Message("many", (torch.full((LARGE,), float(i)),))))
        got = [drive(b.recv(PATIENCE)).body for _ in range(2 * MOST_BUFFERS)]
        assert [is_shared(x) for x in got] == [True] * MOST_BUFFERS + [False] * MOST_BUFFERS
        assert [float(x[-1]) for x in got] == list(range(2 * MOST_BUFFERS))
        del got
        assert is_shared(exchange(a, b, torch.ones(LARGE)).body)
        assert len(send_buffers(a, 1)._buffers) == MOST_BUFFERS


def test_all_buffers_together_are_bounded() -> None:
    limit = 1 << 20
    with sockets_mesh(2, limit_bytes=limit) as (a, b):
        held = [exchange(a, b, torch.ones(limit // 4)).body for _ in range(4)]
        assert [is_shared(x) for x in held] == [True, True, False, False]
        held.clear()
        for elements in range(LARGE, limit // 4, 9999):
            exchange(a, b, torch.ones(elements))
            taken = sum(buffer.memory.nbytes for buffer in send_buffers(a, 1)._buffers)
            assert taken <= 2 * largest(limit)


def test_a_buffer_that_is_not_needed_any_more_goes_back_at_both_ends() -> None:
    with sockets_mesh(2) as (a, b):
        held = [exchange(a, b, torch.ones(LARGE)).body for _ in range(4)]
        held.clear()
        for _ in range(IDLE_SENDS + 2):
            exchange(a, b, torch.ones(LARGE))
        assert len(send_buffers(a, 1)._buffers) == 1
        mapped = b._connections[0].mappings
        assert mapped is not None
        assert len(mapped._mapped) == 1


def test_without_memory_to_be_had_the_socket_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError("no memory")

    with sockets_mesh(2) as (a, b):
        monkeypatch.setattr(os, "posix_fallocate", full)
        x = torch.randn(LARGE)
        assert torch.equal(exchange(a, b, x).body, x)


def test_one_node_without_shared_memory_is_served_by_the_socket() -> None:
    store = dist.HashStore()

    def node(rank: int) -> bool:
        t = SocketTransport.connect(rank, 2, store, limit_bytes=1 << 20, share_memory=rank == 0)
        drive(t.send(1 - rank, Message("large", (torch.ones(LARGE),))))
        shared = is_shared(drive(t.recv(PATIENCE)).body)
        drive(t.close())
        return shared

    assert in_threads(2, node) == [False, False]


def test_what_a_peer_sent_outlives_it() -> None:
    with sockets_mesh(2) as (a, b):
        got = exchange(a, b, torch.ones(LARGE)).body
    assert float(got.sum()) == LARGE


@contextlib.contextmanager
def transport_and_raw_peer() -> Iterator[tuple[SocketTransport, socket.socket]]:
    """Node 0 as a transport, node 1 as a bare socket that has promised to share memory."""
    store = dist.HashStore()

    def join(rank: int) -> object:
        if rank == 0:
            return SocketTransport.connect(0, 2, store, limit_bytes=1 << 20, timeout=PATIENCE)
        return connections.connect_all(1, 2, store, timeout=PATIENCE, host="127.0.0.1", share=True)

    transport, mesh = in_threads(2, join)
    raw = mesh.take_verified()[0].sock
    try:
        yield transport, raw
    finally:
        raw.close()
        mesh.close()
        drive(transport.close())


def test_a_lost_peer_s_buffers_are_given_back() -> None:
    with transport_and_raw_peer() as (t, raw):
        files = open_files()
        drive(t.send(1, Message("never read", (torch.ones(LARGE),))))
        assert open_files() == files + 1
        raw.shutdown(socket.SHUT_RDWR)
        assert drive(t.recv(PATIENCE)).tag == LOST
        assert open_files() == files
        drive(t.send(1, Message("too late", (torch.ones(LARGE),))))
        assert open_files() == files


ONE = torch.ones(LARGE)


@pytest.mark.parametrize(
    ("kind", "wrong", "parts", "reason"),
    [
        (LARGE_MESSAGE, {"fd": 0}, (ONE,), "refers to memory in its file 0"),
        (LARGE_MESSAGE, {"fd": -1}, (ONE,), "cannot be opened"),
        (LARGE_MESSAGE, {"fd": 1 << 20}, (ONE,), "cannot be opened"),
        (LARGE_MESSAGE, {"serial": 1 << 60}, (ONE,), "has serial number"),
        (LARGE_MESSAGE, {"offset": 64}, (ONE,), "do not fit"),
        (LARGE_MESSAGE, {"offset": 2**64 - 64}, (ONE,), "do not fit"),
        (LARGE_MESSAGE, {}, (torch.ones(2 * LARGE),), "do not fit"),
        (LARGE_MESSAGE, {}, (torch.empty(1).expand(1 << 40),), "exceeds the limit"),
        (SHARED_READ, {"slot": 1 << 20}, (ONE,), "slot 1048576"),
        (SHARED_READ, {"offset": 2}, (torch.ones(1),), "cannot begin at"),
        (WINDOW, {}, (), "a window with shapes"),
        (WINDOW, {}, (ONE, ONE), "a window with shapes"),
        (9, {}, (ONE,), "kind of memory location 9"),
        (COPY, {}, (ONE,), "without a goodbye"),
    ],
)
def test_a_peer_that_tells_of_memory_that_is_not_so_is_lost(
    kind: int, wrong: dict[str, int], parts: tuple[Tensor, ...], reason: str
) -> None:
    made = SharedMemory.create(ONE.nbytes)
    location = MemoryLocation(kind, made.fd, made.serial)._replace(**wrong)
    header = frames.encode(Message("odd"), parts, 1)
    try:
        with transport_and_raw_peer() as (t, raw):
            files = open_files()
            raw.sendall(frames.encode_location(header, location))
            raw.shutdown(socket.SHUT_WR)
            notice = drive(t.recv(PATIENCE))
            assert (notice.tag, notice.src) == (LOST, 1)
            assert reason in t.reasons[1]
            assert open_files() == files
    finally:
        made.close()


def test_memory_where_none_was_agreed_is_refused() -> None:
    with sockets_mesh(2, share_memory=False) as (a, b):
        connection = a._connections[1]
        connection.send_location(
            frames.encode(Message("odd"), (ONE,), 0), MemoryLocation(LARGE_MESSAGE, 1, 1)
        )
        assert drive(b.recv(PATIENCE)).tag == LOST
        assert "shares none" in b.reasons[0]


def test_a_node_in_another_place_is_served_by_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose memory cannot be opened, as in another container, says hello all the same."""
    monkeypatch.setattr("shoal.transports.shared_memory.memory.os.getpid", lambda: 2**22 + 1)
    with sockets_mesh(2) as (a, b):
        assert not is_shared(exchange(a, b, torch.ones(LARGE)).body)
