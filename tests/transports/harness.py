"""Worlds of connected transports in one process, one thread a node, for the conformance suite."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from forked import CONTEXT, Ends, ensure_fork_server, folders
from shoal.core.transport import Transport
from shoal.transports.gloo import GlooTransport
from shoal.transports.sockets import SocketTransport
from shoal.transports.sockets.handshake import NONCE_BYTES, Credentials

LIMIT = 64 << 20

_PREAMBLE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from harness import drive
from shoal.core.errors import PeerLost
from shoal.transports.sockets import SocketTransport
from shoal.transports.gloo import GlooTransport
"""

Body = Callable[[Any], Coroutine[Any, Any, Any]]


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that blocks and never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a real transport suspended its coroutine")


def open_files() -> int:
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_memories() -> int:
    """How many of the open files are shared memory; sockets come and go in threads of their own."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(file.readlink()).startswith("/memfd:")
    return found


def introduce(sock: socket.socket, credentials: Credentials) -> None:
    """What a node says that has called another one."""
    challenge = sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
    with contextlib.suppress(ConnectionError):  # so many called that the door did not wait for this one
        sock.sendall(credentials.hello(sock.getpeername()[1], challenge, bytes(NONCE_BYTES)))


def is_shared(x: Tensor) -> bool:
    """Whether the tensor lies in memory that processes share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= x.data_ptr() < last:
            return "memfd:shoal" in line
    raise AssertionError("the tensor lies nowhere")


def in_threads(size: int, node: Callable[[int], Any], seconds: float = 30.0) -> list[Any]:
    """What `node(rank)` returns on each rank; raises the first thing any of them raised."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = node(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), f"a node still hangs after {seconds} s"
    return results


class NodeProcess:
    """A process that the fork server made: torch and shoal are imported already. Used as a Popen is."""

    def __init__(self, script: str) -> None:
        ensure_fork_server()
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout = os.fdopen(ours_out)
        self._process = CONTEXT.Process(target=_run_node, args=(script, Ends(theirs_in, theirs_out)))
        try:
            self._process.start()
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a node", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it still prints, once it has ended."""
        self.wait(timeout)
        return self.stdout.read(), None

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self._process.join()
        self._process.close()


def _run_node(script: str, ends: Ends) -> None:
    """In the new process: run the script as `python -c` would, exit handlers included."""
    for fd, end in enumerate(ends.fds):
        os.dup2(end, fd)
        os.close(end)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    try:
        exec(compile(_PREAMBLE + textwrap.dedent(script), "a node", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


@contextlib.contextmanager
def in_process(script: str) -> Iterator[NodeProcess]:
    """A node in a process of its own, to be killed or stopped; gone when the context ends."""
    with contextlib.closing(NodeProcess(script)) as child:
        try:
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def in_interpreter(script: str) -> Iterator[subprocess.Popen[str]]:
    """The same in a fresh interpreter, for what it has imported or how it ends. Takes seconds: torch."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": folders()},
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def _world(size: int, body: Body, connect: Callable[[int], Transport]) -> list[Any]:
    def node(rank: int) -> Any:
        transport = connect(rank)
        try:
            return drive(body(transport))
        finally:
            drive(transport.close())

    return in_threads(size, node)


def sockets_world(size: int, body: Body, share_memory: bool | None = None) -> list[Any]:
    store = dist.HashStore()

    def connect(rank: int) -> Transport:
        return SocketTransport.connect(
            rank, size, store, limit_bytes=LIMIT, timeout=10, share_memory=share_memory
        )

    return _world(size, body, connect)


@contextlib.contextmanager
def sockets_mesh(size: int, *, limit_bytes: int = LIMIT, **options: Any) -> Iterator[list[SocketTransport]]:
    """Connected transports, for a test that plays all nodes itself; closed together at the end."""
    store = dist.HashStore()

    def connect(rank: int) -> SocketTransport:
        return SocketTransport.connect(
            rank, size, store, limit_bytes=limit_bytes, **{"timeout": 10.0, **options}
        )

    transports = in_threads(size, connect)
    try:
        yield transports
    finally:
        in_threads(size, lambda rank: drive(transports[rank].close()))


def gloo_world(size: int, body: Body) -> list[Any]:
    store = dist.HashStore()
    return _world(
        size,
        body,
        lambda rank: GlooTransport.connect(rank, size, store, workers=size, limit_bytes=LIMIT, timeout=10),
    )


def grpc_world(
    size: int, body: Body, hubs: tuple[int, ...] = (0,), share_memory: bool | None = None
) -> list[Any]:
    from shoal.transports.grpc import GrpcTransport, Security

    store = dist.HashStore()
    return _world(
        size,
        body,
        lambda rank: GrpcTransport.connect(
            rank,
            size,
            hubs=hubs,
            store=store,
            security=Security(),
            run_id="0" * 32,
            manifest="none",
            limit_bytes=LIMIT,
            timeout=10,
            share_memory=share_memory,
        ),
    )
