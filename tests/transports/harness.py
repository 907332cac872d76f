"""Worlds of connected transports in one process, one thread a node, for the conformance suite."""

from __future__ import annotations

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

import shoal
from shoal.core.transport import Transport
from shoal.transports.cards import NONCE_BYTES, Card
from shoal.transports.sockets import SocketTransport
from shoal.transports.torch_dist import TorchTransport

LIMIT = 64 << 20

_PREAMBLE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from harness import drive
from shoal.core.errors import PeerLost
from shoal.transports.sockets import SocketTransport
from shoal.transports.torch_dist import TorchTransport
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


def introduce(sock: socket.socket, card: Card) -> None:
    """What a node says that has called another one."""
    challenge = sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
    with contextlib.suppress(ConnectionError):  # so many called that the door did not wait for this one
        sock.sendall(card.hello(sock.getpeername()[1], challenge, bytes(NONCE_BYTES)))


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


@contextlib.contextmanager
def in_process(script: str, *, talks: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A node in a process of its own, to be killed or stopped; gone when the context ends."""
    folders = (Path(shoal.__file__).parents[1], Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdin=subprocess.PIPE if talks else None,
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
        lambda rank: TorchTransport.connect(rank, size, store, workers=size, limit_bytes=LIMIT, timeout=10),
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
