"""Forks: a child that a node has forked does not hide that the node is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import drive, in_process, sockets_mesh

from shoal.core.transport import LOST
from shoal.transports.forks import close_on_fork
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.memory import SharedMemory
from shoal.transports.shared_memory.windows import SharedWindow
from shoal.transports.sockets import SocketTransport
from shoal.transports.sockets.handshake import Credentials, Handshaker, listen

needs_memory = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of threads: the child uses none

PATIENCE = 10.0


@contextlib.contextmanager
def sleeper() -> Iterator[int]:
    """A forked child that does nothing, as the workers of a DataLoader between two batches; its number."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        theirs.send(b".")  # from here on it is on its own
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        with ours:
            ours.recv(1)
            yield child
    finally:
        os.waitpid(child, 0)


def files_of(pid: int | str) -> list[str]:
    """What a process has open, but for pipes."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]  # noqa: PTH115
    return [link for link in links if link.startswith(("socket:", "/memfd:shoal", "anon_inode:"))]


def test_the_end_of_a_connection_is_seen_though_a_child_lives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = close_on_fork(socket.create_connection(listener.getsockname()))
        with listener.accept()[0] as far:
            far.settimeout(PATIENCE)
            with sleeper():
                near.close()
                assert far.recv(1) == b""


def test_a_door_is_shut_though_a_child_lives() -> None:
    listener = listen("127.0.0.1", 2)
    address = listener.getsockname()
    lobby = Handshaker(Credentials(0, 2, bytes(32)), listener)
    with sleeper():
        lobby.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@needs_memory
def test_a_lock_is_lifted_when_its_holder_is_gone_though_a_child_lives() -> None:
    made = SharedMemory.create(100)
    other = SharedMemory.attach(os.getpid(), made.fd, made.serial, 1 << 20)
    shape = (torch.uint8, 100)
    mine, theirs = (
        SharedWindow(m, shape, owner=0, rank=rank, timeout=1) for rank, m in enumerate((made, other))
    )
    assert theirs._lock(0)
    with sleeper():
        assert not mine._lock(0), "that a child lives on must not lift it either"
        other.close()
        assert mine._lock(0)
    made.close()


@needs_memory
def test_a_child_keeps_no_file_of_its_parent_s_nodes_and_they_go_on() -> None:
    with contextlib.ExitStack() as stack:
        before = files_of("self")
        mesh = stack.enter_context(sockets_mesh(2))
        mesh[0].share(torch.ones(3))
        drive(mesh[0].open_window(0, torch.ones(3)))
        drive(mesh[1].open_window(0, torch.ones(3)))
        child = stack.enter_context(sleeper())
        assert len(files_of("self")) > len(before)
        assert len(set(files_of(child)) - set(before)) == 1, "its own, to tell that it lives"
        assert drive(mesh[1].accumulate(0, torch.ones(3))) == 0


@needs_memory
@pytest.mark.slow
def test_a_node_that_is_killed_is_lost_at_once_though_a_child_lives(tmp_path: Path) -> None:
    """And what it held of a window is free."""
    path = str(tmp_path / "store")
    script = f"""
        t = SocketTransport.connect(1, 2, dist.FileStore({path!r}, 2), limit_bytes=100)
        drive(t.open_window(0, torch.zeros(4)))
        assert t._windows.find(0)._lock(0)
        if os.fork() == 0:
            sys.stdin.readline()
            os._exit(0)
        print("here", flush=True)
        time.sleep(60)
    """
    with in_process(script) as child:
        t = SocketTransport.connect(
            0, 2, dist.FileStore(path, 2), limit_bytes=100, timeout=2.0, meeting_seconds=60
        )
        drive(t.open_window(0, torch.zeros(4)))
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        began = time.monotonic()
        child.kill()
        assert drive(t.recv(PATIENCE)).tag == LOST
        assert drive(t.accumulate(0, torch.ones(4))) == 0
        assert time.monotonic() - began < 2.0
        drive(t.close())
