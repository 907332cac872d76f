"""Nodes that talk gRPC, for the tests that need one of them broken, frozen or alone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import drive, in_threads

from shoal.core.transport import Message, Transport
from shoal.transports.grpc import GrpcTransport, Security

PATIENCE = 20.0
RUN = "5" * 32
MANIFEST = "3 x float32"
LIMIT = 16 << 20
WAIT = "time.sleep(60)"


def connect(rank: int, size: int, store: Any, hubs: tuple[int, ...] = (0,), **options: Any) -> GrpcTransport:
    settings: dict[str, Any] = {
        "run_id": RUN,
        "manifest": MANIFEST,
        "limit_bytes": LIMIT,
        "security": Security(),
        "timeout": PATIENCE,
        **options,
    }
    return GrpcTransport.connect(rank, size, hubs=hubs, store=store, **settings)


@contextlib.contextmanager
def nodes(size: int, hubs: tuple[int, ...] = (0,), **options: Any) -> Iterator[tuple[list[Any], Any]]:
    """Connected transports, and the store they met at."""
    store = dist.HashStore()
    transports = in_threads(size, lambda rank: connect(rank, size, store, hubs, **options))
    try:
        yield transports, store
    finally:
        in_threads(size, lambda rank: drive(transports[rank].close()))


def receive(t: Transport, seconds: float = PATIENCE) -> Message:
    m: Message = drive(t.recv(seconds))
    return m


def notices(t: Transport, count: int) -> list[tuple[str, int, int]]:
    """Tag, source and incarnation of the next messages."""
    got = [receive(t) for _ in range(count)]
    return [(m.tag, m.src, m.incarnation) for m in got]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def script(rank: int, size: int, path: Path, then: str, security: str = "Security()", **options: Any) -> str:
    """A node in a process of its own, which prints a line when it is connected."""
    options = {"hubs": (0,), "timeout": 60.0, **options}
    return f"""
from shoal.core.transport import Message
from shoal.transports.grpc import GrpcTransport, Security
t = GrpcTransport.connect({rank}, {size}, store=dist.FileStore({str(path)!r}, 100), security={security},
    run_id={RUN!r}, manifest={MANIFEST!r}, limit_bytes={LIMIT}, **{options!r})
print("here", flush=True)
{then}
"""


class Puppet:
    """A process that does what it is told, so that one start serves several tests."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.modules = self.hear()

    def do(self, code: str) -> None:
        """Run this, in the background of the test."""
        assert self.child.stdin is not None
        self.child.stdin.write(repr(code) + "\n")
        self.child.stdin.flush()

    def hear(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped, once the node that it plays is connected."""
        assert self.hear() == "here\n"
        self.child.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.child.send_signal(signal.SIGCONT)
