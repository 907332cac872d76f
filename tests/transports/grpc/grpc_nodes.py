"""Nodes that talk gRPC, for the tests that need one of them broken, frozen or alone."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from harness import NodeProcess, drive, in_threads

from shoal.core.transport import JOINED, Message, Transport
from shoal.transports import frames
from shoal.transports.grpc import GrpcTransport, Security
from shoal.transports.grpc.control_pb2 import JoinReply
from shoal.transports.grpc.hub_protocol import JOIN, POST, PUSH, Envelope, GrpcConfig, slices

PATIENCE = 20.0
RUN = "5" * 32
MANIFEST = "3 x float32"
LIMIT = 16 << 20
WAIT = "time.sleep(60)"

WAYS = {"memory": None, "wire": False}
"""Values of `share_memory`: large messages through shared memory where that can be had, or never."""


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

    def __init__(self, child: NodeProcess) -> None:
        self.child = child

    def do(self, code: str) -> None:
        """Run this, in the background of the test."""
        self.child.stdin.write(repr(code) + "\n")
        self.child.stdin.flush()

    def hear(self) -> str:
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


class Caller:
    """Somebody who speaks gRPC, knows the number of the run, and says whatever a test wants."""

    def __init__(self, address: str, **metadata: str) -> None:
        self.channel = grpc.insecure_channel(
            address,
            options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.metadata = {"authorization": f"Bearer {RUN}", **metadata}

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, data: bytes, timeout: float | None = PATIENCE) -> bytes:
        answer: bytes = self.channel.unary_unary(method)(
            data, timeout=timeout, metadata=tuple(self.metadata.items())
        )
        return answer

    def push(self, *pieces: bytes) -> bytes:
        answer: bytes = self.channel.stream_unary(PUSH)(
            iter(pieces), timeout=PATIENCE, metadata=tuple(self.metadata.items())
        )
        return answer

    def join(self, **changes: Any) -> JoinReply:
        hello = GrpcConfig(1, 2, (0,), RUN, MANIFEST, LIMIT, PATIENCE, 5.0).join_request()
        for name, value in changes.items():
            setattr(hello, name, value)
        welcome = JoinReply.FromString(self.call(JOIN, hello.SerializeToString()))
        self.metadata["shoal-session"] = welcome.session
        return welcome

    def outcome(self, method: str, data: bytes) -> str:
        """The name of the code that the call ends with."""
        try:
            self.call(method, data)
        except grpc.RpcError as refusal:
            return str(refusal.code().name)
        return "OK"

    def is_refused(self, code: str, method: str, data: bytes, **options: Any) -> str:
        """What it hears when it says that."""
        with pytest.raises(grpc.RpcError) as refusal:
            self.call(method, data, **options)
        assert refusal.value.code().name == code, refusal.value
        return str(refusal.value.details())


@contextlib.contextmanager
def hub_and_caller(hello: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[Any, Caller]]:
    """Node 0, a hub, and somebody who has joined it as node 1, with what is special in its Hello."""
    store = dist.HashStore()

    def play(rank: int) -> Any:
        if rank == 0:
            return connect(0, 2, store, **options)
        caller = Caller(store.get("shoal/grpc/0").decode())
        caller.join(**(hello or {}))
        return caller

    hub, caller = in_threads(2, play)
    with caller:
        try:
            yield hub, caller
        finally:
            hub._hub.lose(hub._hub._by_rank[1], "it answers no goodbye")
            drive(hub.close())


def message(
    tag: str = "x", *parts: torch.Tensor, number: int = 1, src: int = 1, dst: int = 0
) -> tuple[bytes, bytes]:
    """The envelope and the body of a message as they travel."""
    envelope = Envelope(number, dst, 0, frames.encode(Message(tag), parts, src))
    return envelope.pack(), b"".join(map(bytes, slices(parts)))


def is_alive(hub: GrpcTransport, caller: Caller) -> bool:
    """Whether the hub still takes in who joins and what they say."""
    caller.join(incarnation=1)
    assert notices(hub, 1) == [(JOINED, 1, 1)]
    caller.call(POST, b"".join(message("fine")))
    return receive(hub).tag == "fine"
