"""HubCalls: the gRPC calls of one session of a node at a hub."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from torch import Tensor

from shoal.transports.frames import bytes_of
from shoal.transports.grpc.control_pb2 import FetchRequest, JoinReply, PollRequest, Receipt
from shoal.transports.grpc.hub_protocol import (
    FETCH,
    HANDSHAKE_SECONDS,
    INLINE_BYTES,
    JOIN,
    POLL,
    POST,
    PUSH,
    SESSION,
    Envelope,
    GrpcConfig,
    channel_options,
    slices,
)
from shoal.transports.grpc.security import Security, bearer
from shoal.transports.shared_memory.large_messages import LargeMessages
from shoal.transports.shared_memory.memory import MemoryProbe

CROWDED_PAUSE = 0.02
"""Seconds before a call is repeated at a hub that has too many under way."""


class CallFailed(Exception):
    """A failed call: gRPC's status code name and details."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class HubCalls:
    """Calls with deadlines; all of them raise CallFailed.

    Large bodies have a connection of their own, so that they delay neither polls nor keepalives.
    """

    def __init__(
        self,
        address: str,
        config: GrpcConfig,
        probe: MemoryProbe,
        security: Security,
        passwords: tuple[str, ...],
    ) -> None:
        self.reason = ""  # why this end closed the channels
        self.large_messages = LargeMessages(0, config.limit_bytes)  # none before the hub has answered
        self._config = config
        self._probe = probe
        self._metadata = bearer(passwords)
        self._sent = 0
        options = channel_options(config.failure_timeout, config.patience)
        self._channels = [security.channel(address, options) for _ in range(2)]
        control, bulk = self._channels
        self._join, self._poll, self._post = (control.unary_unary(call) for call in (JOIN, POLL, POST))
        self._push = bulk.stream_unary(PUSH, request_serializer=bytes)
        self._fetch = bulk.unary_stream(FETCH)

    def join(self) -> int:
        """Join the hub; returns the hub's incarnation."""
        seconds = min(HANDSHAKE_SECONDS, self._config.call_seconds())
        join_request = self._config.join_request()
        join_request.pid, join_request.fd, join_request.serial = self._probe.location
        with _as_call_failed():
            answer = self._join(join_request.SerializeToString(), timeout=seconds, metadata=self._metadata)
        welcome = JoinReply.FromString(answer)
        self._metadata = (*self._metadata, (SESSION, welcome.session))
        self.large_messages = LargeMessages(
            self._probe.sharing_pid(welcome),
            self._config.limit_bytes,
            is_mapped=self._probe.shares and welcome.pid > 0,
        )
        return welcome.incarnation

    def poll(self, received: int) -> bytes:
        """The next records. The hub answers within the failure timeout, with none if there are none."""
        ask = PollRequest(received=received, maps=self.large_messages.pid > 0).SerializeToString()
        return self._insist(
            self._config.silence_seconds,
            lambda seconds: self._poll(ask, timeout=seconds, metadata=self._metadata),
        )

    def fetch(self, number: int, nbytes: int) -> Iterator[bytes]:
        """The body of a large message, in slices. Complete if the iterator ends without an error."""
        want = FetchRequest(number=number).SerializeToString()
        seconds = self._config.call_seconds(nbytes)
        with _as_call_failed():
            yield from self._fetch(want, timeout=seconds, metadata=self._metadata)

    def send(self, dst: int, session_number: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Send one message to the hub; retries while it has no room."""
        envelope = Envelope(self._sent + 1, dst, session_number, header).pack()
        while Receipt.FromString(self._offer(envelope, parts)).busy:
            pass
        self._sent += 1

    def leave(self, goodbye: bytes, seconds: float) -> Any:
        """Say goodbye; returns the future of the hub's receipt."""
        envelope = Envelope(self._sent + 1, -1, 0, goodbye).pack()
        with _as_call_failed():
            return self._post.future(envelope, timeout=seconds, metadata=self._metadata)

    def cut(self, reason: str = "") -> None:
        """Close the channels: all calls under way fail at once."""
        self.reason = self.reason or reason
        for channel in self._channels:
            channel.close()

    def _offer(self, envelope: bytes, parts: Sequence[Tensor]) -> bytes:
        nbytes = sum(part.nbytes for part in parts)

        def offer(seconds: float) -> Any:
            if nbytes <= INLINE_BYTES:
                whole = b"".join((envelope, *map(bytes_of, parts)))
                return self._post(whole, timeout=seconds, metadata=self._metadata)
            stream = itertools.chain((envelope,), slices(parts))
            return self._push(stream, timeout=seconds, metadata=self._metadata)

        return self._insist(self._config.call_seconds(nbytes), offer)

    def _insist(self, seconds: float, call: Callable[[float], Any]) -> bytes:
        """Make a call; repeat it while the hub has too many calls under way."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with _as_call_failed():
                    return bytes(call(deadline - time.monotonic()))
            except CallFailed as error:
                if "Concurrent RPC limit" not in error.text or time.monotonic() + CROWDED_PAUSE > deadline:
                    raise
            time.sleep(CROWDED_PAUSE)


@contextlib.contextmanager
def _as_call_failed() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise CallFailed(error.code().name, error.details() or "") from None
    except ValueError as error:  # the channel has just been closed
        raise CallFailed("CANCELLED", str(error)) from None
