"""HubCalls: the gRPC calls of one session of a node at a hub."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from torch import Tensor

from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.frames import bytes_of
from shoal.transports.grpc.control_pb2 import FetchRequest, JoinReply, PollRequest, Receipt
from shoal.transports.grpc.hub_protocol import (
    HANDSHAKE_SECONDS,
    INLINE_BYTES,
    SESSION,
    Envelope,
    GrpcConfig,
    slices,
)
from shoal.transports.grpc.redial import HubLine, Redial
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

    A call whose connections are replaced is repeated on the new ones.
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
        self._redial = Redial(lambda number: HubLine(number, address, config, security), config, self.cut)

    def join(self) -> int:
        """Join the hub; returns the hub's incarnation."""
        seconds = min(HANDSHAKE_SECONDS, self._config.call_seconds())
        join_request = self._config.join_request()
        join_request.pid, join_request.fd, join_request.serial = self._probe.location
        with _as_call_failed():
            answer = self._redial.line.join(
                join_request.SerializeToString(), timeout=seconds, metadata=self._metadata
            )
        welcome = JoinReply.FromString(answer)
        self._metadata = (*self._metadata, (SESSION, welcome.session))
        self._redial.start(self._metadata)
        self.large_messages = LargeMessages(
            self._probe.sharing_pid(welcome),
            self._config.limit_bytes,
            is_mapped=self._probe.shares and welcome.pid > 0,
        )
        return welcome.incarnation

    def poll(self, received: int) -> bytes:
        """The next records. The hub answers within the failure timeout, with none if there are none."""
        return self._insist(
            self._config.silence_seconds, lambda line, seconds: self._poll(line, received, seconds)
        )

    def acknowledge(self, received: int) -> None:
        """Tell the hub that its last record has come. Not repeated: the hub then ends the session."""
        with _as_call_failed():
            self._poll(self._redial.line, received, CLOSING_SECONDS)

    def fetch(self, number: int, nbytes: int) -> Iterator[bytes]:
        """The body of a large message, in slices. Complete if the iterator ends without an error."""
        want = FetchRequest(number=number).SerializeToString()
        allowed = self._config.call_seconds(nbytes)
        deadline = time.monotonic() + allowed
        got = 0
        while True:
            line = self._redial.line
            try:
                with _as_call_failed():
                    seconds = deadline - time.monotonic()
                    stream = line.fetch(want, timeout=seconds, metadata=line.named(self._metadata))
                    for piece in _after(got, stream):
                        self._redial.note()
                        got += len(piece)
                        yield piece
                return
            except CallFailed as error:
                if not self._redial.await_other(line, error.code, deadline):
                    raise
                deadline = time.monotonic() + allowed  # the hub was just heard on the new line

    def send(self, dst: int, session_number: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Send one message to the hub; retries while it has no room."""
        envelope = Envelope(self._sent + 1, dst, session_number, header).pack()
        while Receipt.FromString(self._offer(envelope, parts)).busy:
            pass
        self._sent += 1

    def leave(self, goodbye: bytes, seconds: float) -> Any:
        """Say goodbye; returns the future of the hub's receipt."""
        envelope = Envelope(self._sent + 1, -1, 0, goodbye).pack()
        line = self._redial.line
        with _as_call_failed():
            return line.post.future(envelope, timeout=seconds, metadata=line.named(self._metadata))

    def cut(self, reason: str = "") -> None:
        """Close the connections: all calls under way fail at once."""
        self.reason = self.reason or reason
        self._redial.close()

    def end(self) -> None:
        """After `cut`: release what the session has used."""
        self._redial.join_thread()
        self.large_messages.close()

    def _poll(self, line: HubLine, received: int, seconds: float) -> Any:
        ask = PollRequest(received=received, maps=self.large_messages.pid > 0).SerializeToString()
        return line.poll(ask, timeout=seconds, metadata=line.named(self._metadata))

    def _offer(self, envelope: bytes, parts: Sequence[Tensor]) -> bytes:
        nbytes = sum(part.nbytes for part in parts)

        def offer(line: HubLine, seconds: float) -> Any:
            if nbytes <= INLINE_BYTES:
                whole = b"".join((envelope, *map(bytes_of, parts)))
                return line.post(whole, timeout=seconds, metadata=line.named(self._metadata))
            stream = itertools.chain((envelope,), slices(parts))
            return line.push(stream, timeout=seconds, metadata=line.named(self._metadata))

        return self._insist(self._config.call_seconds(nbytes), offer)

    def _insist(self, seconds: float, call: Callable[[HubLine, float], Any]) -> bytes:
        """Make a call; repeat it while the hub has too many under way, and on a line that replaces this."""
        deadline = time.monotonic() + seconds
        while True:
            line = self._redial.line
            try:
                with _as_call_failed():
                    answer = bytes(call(line, deadline - time.monotonic()))
                self._redial.note()
                return answer
            except CallFailed as error:
                is_crowded = "Concurrent RPC limit" in error.text
                if is_crowded and time.monotonic() + CROWDED_PAUSE <= deadline:
                    time.sleep(CROWDED_PAUSE)
                elif self._redial.await_other(line, error.code, deadline):
                    deadline = time.monotonic() + seconds  # the hub was just heard on the new line
                else:
                    raise


def _after(skipped: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """What follows after so many bytes."""
    for piece in pieces:
        if skipped < len(piece):
            yield piece[skipped:]
        skipped = max(0, skipped - len(piece))


@contextlib.contextmanager
def _as_call_failed() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise CallFailed(error.code().name, error.details() or "") from None
    except ValueError as error:  # the channel has just been closed
        raise CallFailed("CANCELLED", str(error)) from None
