"""Sockets: the conformance suite, and what strangers, crashes and slow peers do."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, in_process, in_threads, introduce, sockets_world

from shoal.core.errors import PeerLost
from shoal.core.transport import HEADER_BYTES, LEFT, LOST, Message, Transport
from shoal.testing.conformance import CHECKS, World
from shoal.transports import frames
from shoal.transports.frames import MOST_FREE_BUFFERS, SMALLEST_RECYCLED, BufferPool
from shoal.transports.sockets import SocketTransport, connections, handshake
from shoal.transports.sockets.handshake import NONCE_BYTES, Credentials

PATIENCE = 10.0


@pytest.mark.parametrize("share_memory", [True, False], ids=["memory", "sockets alone"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.whole
def test_conformance(check: Callable[[World], None], share_memory: bool) -> None:
    check(partial(sockets_world, share_memory=share_memory))


@contextlib.contextmanager
def transport_and_raw_peer(timeout: float = PATIENCE) -> Iterator[tuple[SocketTransport, socket.socket]]:
    """Node 0 as a transport, node 1 as a bare socket that has joined the mesh."""
    store = dist.HashStore()

    def join(rank: int) -> SocketTransport | socket.socket:
        if rank == 0:
            return SocketTransport.connect(0, 2, store, limit_bytes=1 << 20, timeout=timeout)
        mesh = connections.connect_all(1, 2, store, timeout=PATIENCE, host="127.0.0.1")
        raw = mesh.take_verified()[0].sock
        mesh.close()
        return raw

    transport, raw = in_threads(2, join)
    try:
        yield transport, raw
    finally:
        raw.close()
        drive(transport.close())


def frame(tag: str, *parts: torch.Tensor, src: int = 1) -> bytes:
    return frames.encode(Message(tag), parts, src) + b"".join(map(frames.bytes_of, parts))


# Joining


def test_strangers_neither_enter_nor_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.1)
    store = dist.HashStore()
    strangers: list[socket.socket] = []

    def stranger(said: bytes | Credentials) -> None:
        host, port = store.get("shoal/addr/0").decode().split()
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].settimeout(PATIENCE)
        if isinstance(said, Credentials):
            introduce(strangers[-1], said)
        else:
            strangers[-1].sendall(said)
            assert len(strangers[-1].recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES

    def node(rank: int) -> object:
        if rank == 1:
            token = bytes.fromhex(store.get("shoal/token").decode())
            for said in (
                b"",
                b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything you have\r\n\r\n",
                Credentials(1, 2, bytes(32)),  # the right rank, a wrong token
                Credentials(0, 2, token),  # a rank of its own
                Credentials(2, 2, token),  # a rank that there is not
            ):
                stranger(said)
            for sock in strangers:
                # a reset where something it said was left unread, else an end of file
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        transport = SocketTransport.connect(rank, 2, store, limit_bytes=LIMIT, timeout=PATIENCE)
        drive(transport.send(1 - rank, Message("hello")))
        heard = drive(transport.recv(PATIENCE)).src
        drive(transport.close())
        return heard

    assert in_threads(2, node) == [1, 0]
    for sock in strangers:
        sock.close()


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()

    def node(rank: int) -> str:
        with pytest.raises(PeerLost) as lost:
            SocketTransport.connect(rank, 4, store, limit_bytes=LIMIT, timeout=0.2)
        return str(lost.value)

    first, second = in_threads(2, node)
    assert first.startswith("node 2, 3 did not join the mesh within 0.2 s (I am node 0)")
    assert second.startswith("node 2, 3 did not join the mesh within 0.2 s (I am node 1)")


def test_a_missing_first_node_is_named() -> None:
    with pytest.raises(PeerLost, match="node 0 did not come to the meeting point"):
        SocketTransport.connect(1, 2, dist.HashStore(), limit_bytes=LIMIT, timeout=0.05)


def test_a_node_that_died_after_publishing_its_address_is_named() -> None:
    store = dist.HashStore()
    store.set("shoal/token", "00" * 32)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        store.set("shoal/addr/0", f"127.0.0.1 {dead.getsockname()[1]}")
    with pytest.raises(PeerLost, match="node 0 published"):
        SocketTransport.connect(1, 2, store, limit_bytes=LIMIT, timeout=PATIENCE)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::"])
def test_an_address_off_this_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="not an IPv4 loopback address"):
        SocketTransport.connect(0, 1, dist.HashStore(), limit_bytes=LIMIT, host=host)


# Leaving


def test_a_peer_that_closes_is_announced_once() -> None:
    with transport_and_raw_peer() as (t, raw):
        raw.sendall(frame("last") + frame(LEFT))
        raw.shutdown(socket.SHUT_WR)
        assert [drive(t.recv(PATIENCE)).tag for _ in range(2)] == ["last", LEFT]
        raw.settimeout(PATIENCE)
        assert raw.recv(1) == b"", "who says goodbye is answered by an end of file"
        assert list(t.drain()) == []
        assert t.reasons == {}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "without a goodbye"),
        (frame("cut", torch.ones(9))[:-1], "without a goodbye"),
        (frame("cut")[:50], "without a goodbye"),
        (bytes(HEADER_BYTES), "not a Shoal message"),
        (frame("forged", src=0), "in the name of node 0"),
        (frame(LOST), "'lost'"),
        (frames.encode(Message("huge"), (torch.empty(1).expand(1 << 40),), 1), "exceeds the limit"),
    ],
)
def test_a_peer_that_breaks_off_or_talks_nonsense_is_lost(said: bytes, reason: str) -> None:
    with transport_and_raw_peer() as (t, raw):
        raw.sendall(frame("fine", torch.arange(3)) + said)
        raw.shutdown(socket.SHUT_WR)
        assert drive(t.recv(PATIENCE)).body.tolist() == [0, 1, 2]
        notice = drive(t.recv(PATIENCE))
        assert (notice.tag, notice.src) == (LOST, 1)
        assert reason in t.reasons[1]
        drive(t.send(1, Message("harmless", (torch.zeros(1 << 18),))))
        assert list(t.drain()) == []


@pytest.mark.slow
def test_a_peer_that_takes_nothing_is_lost() -> None:
    with transport_and_raw_peer(timeout=0.1) as (t, _):
        for _ in range(64):  # until every buffer between the two is full
            drive(t.send(1, Message("full", (torch.zeros(1 << 18),))))
        assert drive(t.recv(PATIENCE)).tag == LOST
        assert "does not take what it is sent" in t.reasons[1]


def test_closing_waits_no_longer_than_its_limit_for_a_frozen_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transports.sockets.transport.CLOSING_SECONDS", 0.1)
    with transport_and_raw_peer() as (t, _):
        began = time.monotonic()
        drive(t.close())
        assert 0.1 <= time.monotonic() - began < 5


def test_all_frozen_peers_together_cost_as_much_as_one_and_the_others_hear_a_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.transports.sockets.transport.CLOSING_SECONDS", 0.1)
    store = dist.HashStore()

    def join(rank: int) -> SocketTransport | handshake.Handshaker:
        if rank in (0, 7):
            return SocketTransport.connect(rank, 8, store, limit_bytes=LIMIT, timeout=PATIENCE)
        return connections.connect_all(rank, 8, store, timeout=PATIENCE, host="127.0.0.1")

    first, *frozen, last = in_threads(8, join)
    drive(first.lend(1, Message("state", (first.share(torch.ones(3)),))))
    for peer in frozen:
        peer.verified[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # so that it stays full
    for _ in range(3):
        for rank in range(1, 7):
            fill(first._connections[rank].sock)
        time.sleep(0.02)  # what is under way makes room once more
    drive(first.send(7, Message("last words")))
    began = time.monotonic()
    drive(first.close())
    assert time.monotonic() - began < 0.5
    assert [drive(last.recv(PATIENCE)).tag for _ in range(2)] == ["last words", LEFT]
    for peer in frozen:
        peer.close()
    drive(last.close())


def fill(near: socket.socket) -> None:
    """Leave no room for much more that is sent."""
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16), socket.MSG_DONTWAIT)


@pytest.mark.slow
def test_a_killed_process_is_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    script = f"""
        t = SocketTransport.connect(1, 2, dist.FileStore({path!r}, 2), limit_bytes=100)
        time.sleep(60)
    """
    with in_process(script) as child:
        t = SocketTransport.connect(0, 2, dist.FileStore(path, 2), limit_bytes=100)
        child.kill()
        assert drive(t.recv(PATIENCE)).tag == LOST
        drive(t.close())


def test_closing_leaves_no_thread_and_no_file() -> None:
    threads, files = threading.active_count(), open_files()

    async def body(t: Transport) -> None:
        await t.send((t.rank + 1) % t.size, Message("round", (torch.ones(50_000),)))

    sockets_world(4, body)
    assert threading.active_count() == threads
    assert open_files() == files


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Sending


@pytest.mark.parametrize(
    ("dst", "message", "complaint"),
    [
        (2, Message("nobody"), "no node 2"),
        (-1, Message("nobody"), "no node -1"),
        (1, Message(LEFT), "own notice"),
        (
            1,
            Message("big", (torch.empty(1 << 18), torch.empty(1))),
            "1,048,580 bytes, limit_bytes is 1,048,576",
        ),
        (0, Message("mask", (torch.ones(1, dtype=torch.bool),)), "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_a_value_error(dst: int, message: Message, complaint: str) -> None:
    with transport_and_raw_peer() as (t, _), pytest.raises(ValueError, match=complaint):
        drive(t.send(dst, message))


def test_who_is_interrupted_in_a_send_loses_the_peer_and_is_lost_to_it() -> None:
    """Part of a frame may be on its way: nothing that comes after it could be read."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_a_write() -> None:
        while sys._current_frames()[main].f_code.co_name != "_write_all":
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with transport_and_raw_peer() as (t, raw):
            fill(t._connections[1].sock)
            killer = threading.Thread(target=interrupt_a_write)
            killer.start()
            with pytest.raises(KeyboardInterrupt):
                drive(t.send(1, Message("cut off", (torch.zeros(1 << 18),))))
            killer.join()
            drive(t.send(1, Message("swallowed")))
            notice = drive(t.recv(PATIENCE))
            assert (notice.tag, notice.src) == (LOST, 1)
            assert t.reasons == {1: "a message to it was interrupted"}
            raw.settimeout(PATIENCE)
            while raw.recv(1 << 20):
                pass
    finally:
        signal.signal(signal.SIGUSR1, before)


# Receiving into recycled memory


def test_memory_is_used_again_once_free() -> None:
    pool = BufferPool()
    first, _ = pool.empty(torch.float32, SMALLEST_RECYCLED)
    address = first.data_ptr()
    del first
    again, _ = pool.empty(torch.int32, SMALLEST_RECYCLED)
    assert again.data_ptr() == address


def test_a_slice_keeps_its_memory_when_the_tensor_is_gone() -> None:
    with transport_and_raw_peer() as (t, raw):
        raw.sendall(frame("one", torch.ones(SMALLEST_RECYCLED)))
        kept = drive(t.recv(PATIENCE)).body[10:20]
        gc.collect()
        for _ in range(3):
            raw.sendall(frame("two", torch.full((SMALLEST_RECYCLED,), 2.0)))
            assert drive(t.recv(PATIENCE)).body[0] == 2
        assert kept.tolist() == [1.0] * 10


def test_the_pool_keeps_a_bounded_number_of_buffers() -> None:
    pool = BufferPool()
    held = [pool.empty(torch.uint8, SMALLEST_RECYCLED + i)[0] for i in range(3 * MOST_FREE_BUFFERS)]
    while held:
        del held[0]
    assert len(pool._free) == MOST_FREE_BUFFERS
    assert {buffer.numel() for buffer in pool._free} == {
        SMALLEST_RECYCLED + i for i in range(2 * MOST_FREE_BUFFERS, 3 * MOST_FREE_BUFFERS)
    }


def test_received_tensors_are_filled_in_place() -> None:
    pool = BufferPool()
    tensor, memory = pool.empty(torch.float32, SMALLEST_RECYCLED)
    memory[:4] = struct.pack("f", 1.5)
    assert tensor[0] == 1.5
