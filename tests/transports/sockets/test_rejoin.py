"""Rejoin: a node that was lost is started again, and the others go on with it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, NodeProcess, drive, in_process, in_threads, introduce

from shoal.core.errors import PeerLost
from shoal.core.transport import JOINED, LEFT, LOST, Message
from shoal.transports.shared_memory import memory
from shoal.transports.sockets import SocketTransport, handshake
from shoal.transports.sockets.handshake import HELLO_BYTES, NONCE_BYTES, Credentials

PATIENCE = 10.0
LARGE = 1 << 16


def crash(t: SocketTransport) -> None:
    """End a transport as the kernel does when its process is killed: no goodbye, and the door is shut."""
    t._closing = True
    t._handshaker.stop()
    t._acceptor.join()
    for connection in t._connections.values():
        connection.cut()
        connection.reader.join()
        connection.close()
    t._handshaker.close()
    t._windows.close()


class Mesh:
    """Nodes in one process that crash and come back."""

    def __init__(self, size: int, share_memory: bool | None = None) -> None:
        self.size = size
        self.store = dist.HashStore()
        self.share_memory = share_memory
        self.nodes: dict[int, SocketTransport] = dict(enumerate(in_threads(size, self.connect)))

    def connect(self, rank: int, incarnation: int = 0, timeout: float = PATIENCE) -> SocketTransport:
        return SocketTransport.connect(
            rank,
            self.size,
            self.store,
            limit_bytes=LIMIT,
            timeout=timeout,
            incarnation=incarnation,
            share_memory=self.share_memory,
        )

    def restart(self, rank: int, incarnation: int) -> SocketTransport:
        self.nodes[rank] = self.connect(rank, incarnation)
        return self.nodes[rank]

    def crash(self, rank: int) -> None:
        crash(self.nodes.pop(rank))

    def close(self) -> None:
        nodes = list(self.nodes.values())
        in_threads(len(nodes), lambda i: drive(nodes[i].close()))


@contextlib.contextmanager
def mesh_of(size: int, share_memory: bool | None = None) -> Iterator[Mesh]:
    mesh = Mesh(size, share_memory)
    try:
        yield mesh
    finally:
        mesh.close()


def heard(t: SocketTransport, count: int) -> list[tuple[str, int, int]]:
    got = [drive(t.recv(PATIENCE)) for _ in range(count)]
    return [(m.tag, m.src, m.incarnation) for m in got]


def exchange(a: SocketTransport, b: SocketTransport) -> None:
    """Small and large, both ways."""
    for x in (torch.ones(3), torch.arange(float(LARGE))):
        for src, dst in ((a, b), (b, a)):
            drive(src.send(dst.rank, Message("fine", (x,))))
            m = drive(dst.recv(PATIENCE))
            assert (m.tag, m.src) == ("fine", src.rank)
            assert torch.equal(m.body, x)


@pytest.mark.parametrize("share_memory", [None, False], ids=["memory", "sockets alone"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_lost_node_comes_back(rank: int, share_memory: bool | None) -> None:
    """The lowest, the highest and one between, twice each."""
    others = {0, 1, 2} - {rank}
    with mesh_of(3, share_memory) as mesh:
        for incarnation in (1, 2):
            mesh.crash(rank)
            for other in others:
                assert heard(mesh.nodes[other], 1) == [(LOST, rank, 0)]
            back = mesh.restart(rank, incarnation)
            assert back.incarnation == incarnation
            for other in others:
                assert heard(mesh.nodes[other], 1) == [(JOINED, rank, incarnation)]
                exchange(mesh.nodes[other], back)
        exchange(*(mesh.nodes[other] for other in others))


def test_numbers_may_be_left_out() -> None:
    with mesh_of(2) as mesh:
        mesh.crash(1)
        mesh.restart(1, 7)
        mesh.crash(0)
        mesh.restart(0, 3)
        assert heard(mesh.nodes[1], 2) == [(LOST, 0, 0), (JOINED, 0, 3)]
        exchange(mesh.nodes[0], mesh.nodes[1])


def test_a_node_that_left_in_order_may_come_back() -> None:
    with mesh_of(2) as mesh:
        drive(mesh.nodes.pop(1).close())
        mesh.restart(1, 1)
        assert heard(mesh.nodes[0], 2) == [(LEFT, 1, 0), (JOINED, 1, 1)]
        exchange(mesh.nodes[0], mesh.nodes[1])


def test_a_new_incarnation_takes_the_place_of_one_that_still_runs() -> None:
    """As when a stopped process is given up and wakes later: it is cut off, and its last words come first."""
    with mesh_of(2) as mesh:
        old = mesh.nodes[1]
        drive(old.send(0, Message("old")))
        assert heard(mesh.nodes[0], 1) == [("old", 1, 0)]
        new = mesh.restart(1, 1)
        drive(new.send(0, Message("new")))
        assert heard(mesh.nodes[0], 3) == [(LOST, 1, 0), (JOINED, 1, 1), ("new", 1, 0)]
        assert heard(old, 1) == [(LOST, 0, 0)]
        drive(old.send(0, Message("zombie")))
        exchange(mesh.nodes[0], new)
        assert list(mesh.nodes[0].drain()) == []
        crash(old)


@pytest.mark.parametrize("incarnation", [0, 1, 2])
def test_a_stale_incarnation_is_refused(incarnation: int) -> None:
    with mesh_of(2) as mesh:
        mesh.crash(1)
        mesh.restart(1, 2)
        assert heard(mesh.nodes[0], 2) == [(LOST, 1, 0), (JOINED, 1, 2)]
        with pytest.raises(PeerLost, match=r"node 0 knows a later incarnation of node 1 than this one"):
            mesh.connect(1, incarnation)
        exchange(mesh.nodes[0], mesh.nodes[1])


def test_what_is_sent_before_the_notice_is_taken_goes_nowhere() -> None:
    """It was meant for the incarnation that is lost; an answer to that would confuse its successor."""
    with mesh_of(2) as mesh:
        a = mesh.nodes[0]
        mesh.crash(1)
        new = mesh.restart(1, 1)
        for x in (torch.ones(1), torch.ones(LARGE)):
            drive(a.send(1, Message("for the old one", (x,))))
        assert [m.tag for m in (drive(a.recv(PATIENCE)), drive(a.recv(PATIENCE)))] == [LOST, JOINED]
        drive(a.send(1, Message("for the new one")))
        assert heard(new, 1) == [("for the new one", 0, 0)]


def test_drain_takes_the_notice_too() -> None:
    with mesh_of(2) as mesh:
        a = mesh.nodes[0]
        mesh.crash(1)
        new = mesh.restart(1, 1)
        tags: list[str] = []
        deadline = time.monotonic() + PATIENCE
        while len(tags) < 2 and time.monotonic() < deadline:
            tags += [m.tag for m in a.drain()]
            time.sleep(0.001)
        assert tags == [LOST, JOINED]
        exchange(a, new)


def test_who_is_gone_is_announced_to_the_one_who_comes_back() -> None:
    with mesh_of(3) as mesh:
        mesh.crash(0)
        mesh.crash(2)
        back = mesh.restart(2, 1)
        assert heard(back, 1) == [(LOST, 0, 0)]
        assert "does not answer there" in back.reasons[0]
        drive(back.send(0, Message("nobody")))
        mesh.restart(0, 1)
        assert heard(back, 1) == [(JOINED, 0, 1)]
        assert sorted(heard(mesh.nodes[1], 4)) == [
            (JOINED, 0, 1),
            (JOINED, 2, 1),
            (LOST, 0, 0),
            (LOST, 2, 0),
        ]
        exchange(mesh.nodes[0], back)
        exchange(mesh.nodes[0], mesh.nodes[1])


def test_a_frozen_peer_is_gone_after_the_timeout() -> None:
    with mesh_of(2) as mesh:
        mesh.crash(1)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            mesh.store.set("shoal/addr/0/1", f"127.0.0.1 {mute.getsockname()[1]}")
            mesh.nodes[1] = mesh.connect(1, 1, timeout=0.1)
        assert heard(mesh.nodes[1], 1) == [(LOST, 0, 0)]
        assert "did not answer within 0.1 s" in mesh.nodes[1].reasons[0]


@contextlib.contextmanager
def listener_where(mesh: Mesh, rank: int) -> Iterator[socket.socket]:
    """Somebody who listens at the port that a dead node has published."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(PATIENCE)
        mesh.store.set(f"shoal/addr/{rank}/1", f"127.0.0.1 {stranger.getsockname()[1]}")
        yield stranger


def test_who_listens_where_a_dead_node_did_learns_nothing_of_use() -> None:
    """It hears a proof that fits its own nonce and port, and cannot answer with one."""
    with mesh_of(3) as mesh, contextlib.ExitStack() as stack:
        token = bytes.fromhex(mesh.store.get("shoal/token").decode())
        mesh.crash(1)
        mesh.crash(2)
        stranger = stack.enter_context(listener_where(mesh, 1))
        # it passes on the nonce of a node that lives, to use what it hears there
        host, port = mesh.store.get("shoal/addr/0").decode().split()
        door = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
        said: list[bytes] = []

        def listen() -> None:
            with stranger.accept()[0] as call:
                call.settimeout(PATIENCE)
                call.sendall(door.recv(NONCE_BYTES, socket.MSG_WAITALL))
                said.append(call.recv(HELLO_BYTES, socket.MSG_WAITALL))
                call.sendall(said[0])  # its own words
                said.append(call.recv(1))

        listening = threading.Thread(target=listen)
        listening.start()
        back = mesh.restart(2, 1)
        listening.join(PATIENCE)
        assert token not in said[0] and len(said[0]) == HELLO_BYTES and said[1] == b""
        assert heard(back, 1) == [(LOST, 1, 0)]
        assert "does not know the run's token" in back.reasons[1]
        door.sendall(said[0])
        assert door.recv(1) == b"", "what was said at another door lets nobody in"


@pytest.mark.parametrize("attempt", range(8))
def test_two_that_come_back_at_once_find_each_other(attempt: int) -> None:
    with mesh_of(3) as mesh:
        mesh.crash(0)
        mesh.crash(2)
        ranks = (0, 2)
        back = in_threads(2, lambda i: mesh.connect(ranks[i], 1))
        mesh.nodes.update(zip(ranks, back, strict=True))
        first, last = back
        for t, other in ((first, 2), (last, 0)):
            notices = list(t.drain())
            if notices:  # it called where the other's predecessor had been, and was called by the other later
                assert [(m.tag, m.src) for m in notices] in (
                    [(LOST, other)],
                    [(LOST, other), (JOINED, other)],
                )
                if notices[-1].tag == LOST:
                    assert heard(t, 1) == [(JOINED, other, 1)]
        exchange(first, last)
        assert sorted(tag for tag, _, _ in heard(mesh.nodes[1], 4)) == [JOINED, JOINED, LOST, LOST]


@pytest.mark.parametrize("attempt", range(4))
def test_all_may_come_back_at_once(attempt: int) -> None:
    """As when a whole run is started again: everyone calls everyone, and each pair keeps one line."""
    store = dist.HashStore()

    def node(rank: int) -> list[int]:
        t = SocketTransport.connect(rank, 4, store, limit_bytes=LIMIT, timeout=PATIENCE, incarnation=1)
        for peer in range(4):
            drive(t.send(peer, Message("hello")))
        sources = []
        while len(sources) < 4:
            m = drive(t.recv(PATIENCE))
            if m.tag == "hello":
                sources.append(m.src)
            else:
                assert m.tag == LEFT
        drive(t.close())
        return sorted(sources)

    assert in_threads(4, node) == [[0, 1, 2, 3]] * 4


def test_a_node_may_be_started_again_before_the_run_begins() -> None:
    token = bytes(32)
    listener = handshake.listen("127.0.0.1", 3)
    waiting = handshake.Handshaker(Credentials(0, 3, token), listener)
    with contextlib.ExitStack() as stack:
        calls = []
        for rank, incarnation in ((1, 0), (1, 1), (2, 0)):
            calls.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            calls[-1].settimeout(PATIENCE)
            waiting.await_all(time.monotonic() + 0.01)  # it sends its nonce
            introduce(calls[-1], Credentials(rank, 3, token, incarnation))
            assert waiting.absent(), "nobody is missing before the last has called"
            while waiting._known.get(rank) != incarnation:
                waiting.await_all(time.monotonic() + 0.01)
        assert not waiting.absent()
        assert {rank: contact.incarnation for rank, contact in waiting.verified.items()} == {1: 1, 2: 0}
        waiting.close()
        assert len(calls[0].recv(1000)) == HELLO_BYTES  # it was let in, and then dropped
        assert calls[0].recv(1) == b""


def test_strangers_at_the_open_door_neither_enter_nor_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.1)
    with mesh_of(2) as mesh, contextlib.ExitStack() as stack:
        host, port = mesh.store.get("shoal/addr/0").decode().split()
        token = bytes.fromhex(mesh.store.get("shoal/token").decode())
        strangers = []
        for said in (
            b"",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything you have, and more\r\n\r\n",
            Credentials(1, 2, bytes(32), incarnation=9),
            Credentials(0, 2, token, incarnation=9),
            Credentials(5, 2, token, incarnation=9),
            *[b"slow"] * (handshake.MOST_UNVERIFIED + 5),
        ):
            strangers.append(stack.enter_context(socket.create_connection((host, int(port)))))
            strangers[-1].settimeout(PATIENCE)
            if isinstance(said, Credentials):
                introduce(strangers[-1], said)
            else:
                strangers[-1].sendall(said)
        mesh.crash(1)
        began = time.monotonic()
        mesh.restart(1, 1)
        assert time.monotonic() - began < PATIENCE / 2
        exchange_after_notices(mesh)
        for sock in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert len(sock.recv(2 * NONCE_BYTES, socket.MSG_WAITALL)) <= NONCE_BYTES  # and then the end


def exchange_after_notices(mesh: Mesh) -> None:
    assert [tag for tag, _, _ in heard(mesh.nodes[0], 2)] == [LOST, JOINED]
    exchange(mesh.nodes[0], mesh.nodes[1])


def test_coming_back_many_times_leaves_nothing_behind() -> None:
    with mesh_of(2) as mesh:
        files, threads = [], []
        for incarnation in range(1, 9):
            mesh.crash(1)
            mesh.restart(1, incarnation)
            exchange_after_notices(mesh)
            files.append(len(list(Path("/proc/self/fd").iterdir())))
            threads.append(threading.active_count())
        assert max(files) == files[0]
        assert max(threads) == threads[0]


@pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")
def test_windows_are_told_to_who_comes_back() -> None:
    with mesh_of(2) as mesh:
        exposed = in_threads(2, lambda rank: drive(mesh.nodes[rank].open_window(0, torch.zeros(4))))[0]
        mesh.crash(1)
        back = mesh.restart(1, 1)
        drive(back.open_window(0, torch.zeros(4)))
        drive(back.accumulate(0, torch.ones(4)))
        assert exposed.tolist() == [1] * 4


@pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")
def test_an_owner_that_comes_back_opens_its_window_again() -> None:
    with mesh_of(2) as mesh:
        in_threads(2, lambda rank: drive(mesh.nodes[rank].open_window(1, torch.zeros(4))))
        mesh.crash(1)
        back = mesh.restart(1, 1)
        assert [tag for tag, _, _ in heard(mesh.nodes[0], 2)] == [LOST, JOINED]
        drive(back.open_window(1, torch.ones(4)))
        drive(mesh.nodes[0].open_window(1, torch.zeros(4)))
        out = torch.empty(4)
        assert drive(mesh.nodes[0].fetch(1, out)) == 0
        assert out.tolist() == [1] * 4


def test_a_loan_to_who_comes_back_is_a_new_one() -> None:
    with mesh_of(2) as mesh:
        a = mesh.nodes[0]
        x = a.share(torch.zeros(4))
        drive(a.lend(1, Message("state", (x,))))
        mesh.crash(1)
        drive(a.reclaim(PATIENCE))
        back = mesh.restart(1, 1)
        assert [tag for tag, _, _ in heard(a, 2)] == [LOST, JOINED]
        drive(a.lend(1, Message("state", (x.fill_(1),))))
        m = drive(back.recv(PATIENCE))
        assert m.body.tolist() == [1] * 4
        assert m.release is not None and m.release()


@pytest.mark.parametrize("incarnation", [-1, 65536])
def test_an_incarnation_that_no_header_can_say_is_a_value_error(incarnation: int) -> None:
    with pytest.raises(ValueError, match="incarnation"):
        SocketTransport.connect(0, 1, dist.HashStore(), limit_bytes=LIMIT, incarnation=incarnation)


NODE = """
    from shoal.core.transport import Message
    sys.stdin.readline()
    store = dist.FileStore({path!r}, 3)
    t = SocketTransport.connect({rank}, 3, store, limit_bytes=1 << 24, incarnation={incarnation})
    del store
    while True:
        m = drive(t.recv(60))
        if m.tag == "ask":
            drive(t.send(m.src, Message("answer", m.parts, seq={incarnation})))
        elif m.tag == "left" and m.src == 0:
            break
    drive(t.close())
"""


def ask(t: SocketTransport, peer: int) -> int:
    x = torch.arange(float(LARGE))
    drive(t.send(peer, Message("ask", (x,))))
    while (m := drive(t.recv(60))).tag != "answer" or m.src != peer:
        assert (m.tag, m.src) != (LOST, peer)
    assert torch.equal(m.body, x)
    return m.seq


@pytest.mark.slow
def test_killed_processes_are_started_again(tmp_path: Path) -> None:
    """A worker, then the server, which has the highest rank; they meet in a FileStore, as real runs do."""
    path = str(tmp_path / "store")
    with contextlib.ExitStack() as stack:
        plan = [(1, 0), (2, 0), (1, 1), (2, 1)]
        children = {
            (rank, k): stack.enter_context(in_process(NODE.format(path=path, rank=rank, incarnation=k)))
            for rank, k in plan
        }

        def start(rank: int, incarnation: int) -> NodeProcess:
            child = children[rank, incarnation]
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            return child

        nodes = {rank: start(rank, 0) for rank in (1, 2)}
        t = SocketTransport.connect(0, 3, dist.FileStore(path, 3), limit_bytes=1 << 24)
        assert [ask(t, 1), ask(t, 2)] == [0, 0]
        for rank, incarnation in plan[2:]:
            nodes[rank].kill()
            assert heard(t, 1) == [(LOST, rank, 0)]
            nodes[rank] = start(rank, incarnation)
            m = drive(t.recv(60))
            assert (m.tag, m.src, m.incarnation) == (JOINED, rank, incarnation)
            assert ask(t, rank) == incarnation
            assert ask(t, 3 - rank) >= 0
        drive(t.close())
        for node in nodes.values():
            assert node.wait(PATIENCE) == 0
