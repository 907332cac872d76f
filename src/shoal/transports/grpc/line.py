"""Line: the calls that a node makes to one hub, from joining it until one of the two ends that."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from torch import Tensor

from shoal.transports.frames import bytes_of
from shoal.transports.grpc.control_pb2 import Ask, Receipt, Want, Welcome
from shoal.transports.grpc.door import SESSION
from shoal.transports.grpc.security import Security, bearer
from shoal.transports.grpc.sharing import Sharing
from shoal.transports.grpc.terms import Terms
from shoal.transports.grpc.wire import (
    FETCH,
    HANDSHAKE_SECONDS,
    JOIN,
    POLL,
    POST,
    PUSH,
    WHOLE_BYTES,
    Envelope,
    channel_options,
    patience,
    silence,
    slices,
)
from shoal.transports.memory import Probe

CROWDED_PAUSE = 0.02
"""Seconds before a call is made again to a hub that has too many under way."""


class Broken(Exception):
    """A call that came to nothing: `code` is gRPC's name for it, `text` what is known of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Line:
    """Calls with deadlines; all of them raise Broken.

    Large bodies have a connection of their own, so that they hold up neither a poll nor a sign of life.
    """

    def __init__(
        self, address: str, terms: Terms, probe: Probe, security: Security, passwords: tuple[str, ...]
    ) -> None:
        self.reason = ""  # why it was cut, if this end did
        self._timeout = terms.failure_timeout
        self.sharing = Sharing(0, terms.limit_bytes)  # nothing, before the hub has answered
        self._terms = terms
        self._probe = probe
        self._metadata = bearer(passwords)
        self._sent = 0
        options = channel_options(terms.failure_timeout)
        self._channels = [security.channel(address, options) for _ in range(2)]
        control, bulk = self._channels
        self._join, self._poll, self._post = (control.unary_unary(call) for call in (JOIN, POLL, POST))
        self._push = bulk.stream_unary(PUSH, request_serializer=bytes)
        self._fetch = bulk.unary_stream(FETCH)

    def join(self) -> int:
        """Introduce this node; the hub's incarnation."""
        seconds = min(HANDSHAKE_SECONDS, patience(self._timeout))
        hello = self._terms.hello()
        hello.pid, hello.fd, hello.serial = self._probe.where
        with _told():
            answer = self._join(hello.SerializeToString(), timeout=seconds, metadata=self._metadata)
        welcome = Welcome.FromString(answer)
        self._metadata = (*self._metadata, (SESSION, welcome.session))
        self.sharing = Sharing(
            self._probe.sharing_pid(welcome),
            self._terms.limit_bytes,
            is_mapped=self._probe.shares and welcome.pid > 0,
        )
        return welcome.incarnation

    def poll(self, received: int) -> bytes:
        """The next records. The hub answers within T, if only to say that there are none."""
        ask = Ask(received=received, maps=self.sharing.pid > 0).SerializeToString()
        return self._insist(
            silence(self._timeout), lambda seconds: self._poll(ask, timeout=seconds, metadata=self._metadata)
        )

    def fetch(self, number: int, nbytes: int) -> Iterator[bytes]:
        """The body of a large message, in slices. If it ends, it has come whole."""
        want = Want(number=number).SerializeToString()
        seconds = patience(self._timeout, nbytes)
        with _told():
            yield from self._fetch(want, timeout=seconds, metadata=self._metadata)

    def send(self, dst: int, stay: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Bring one message to the hub, trying again for as long as it has no room."""
        envelope = Envelope(self._sent + 1, dst, stay, header).pack()
        while Receipt.FromString(self._offer(envelope, parts)).busy:
            pass
        self._sent += 1

    def leave(self, goodbye: bytes, seconds: float) -> Any:
        """Say goodbye; the future of its being heard."""
        envelope = Envelope(self._sent + 1, -1, 0, goodbye).pack()
        with _told():
            return self._post.future(envelope, timeout=seconds, metadata=self._metadata)

    def cut(self, reason: str = "") -> None:
        """End all calls at once; whoever waits in one gets an error."""
        self.reason = self.reason or reason
        for channel in self._channels:
            channel.close()

    def _offer(self, envelope: bytes, parts: Sequence[Tensor]) -> bytes:
        nbytes = sum(part.nbytes for part in parts)

        def offer(seconds: float) -> Any:
            if nbytes <= WHOLE_BYTES:
                whole = b"".join((envelope, *map(bytes_of, parts)))
                return self._post(whole, timeout=seconds, metadata=self._metadata)
            stream = itertools.chain((envelope,), slices(parts))
            return self._push(stream, timeout=seconds, metadata=self._metadata)

        return self._insist(patience(self._timeout, nbytes), offer)

    def _insist(self, seconds: float, call: Callable[[float], Any]) -> bytes:
        """Make a call; again, while the hub has too many under way, whoever makes them."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with _told():
                    return bytes(call(deadline - time.monotonic()))
            except Broken as error:
                if "Concurrent RPC limit" not in error.text or time.monotonic() + CROWDED_PAUSE > deadline:
                    raise
            time.sleep(CROWDED_PAUSE)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise Broken(error.code().name, error.details() or "") from None
    except ValueError as error:  # the channel was closed a moment ago
        raise Broken("CANCELLED", str(error)) from None
