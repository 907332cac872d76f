"""Redial: replaces the connections of a session when nothing arrives on them any more.

After an outage TCP sends again what was lost at longer and longer intervals: after 51 s the next time is at
102 s. A new connection is there as soon as the network is. The hub hears of it by a Move; from then on it
ignores calls on earlier connections, and how they end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from shoal.transports.grpc.hub_protocol import (
    FETCH,
    JOIN,
    LINE,
    MOVE,
    POLL,
    POST,
    PUSH,
    STAY,
    GrpcConfig,
    channel_options,
)
from shoal.transports.grpc.security import Metadata, Security

OUTDATED = ("ABORTED", "CANCELLED")
"""How a hub ends calls on connections that others have replaced, those that come and those under way."""


class HubLine:
    """The connections of a session at a hub, the `number`th of them, and the calls that can be made on them.

    Large bodies have a connection of their own, so that they delay neither polls nor keepalives.
    """

    def __init__(self, number: int, address: str, config: GrpcConfig, security: Security) -> None:
        options = channel_options(config.failure_timeout, config.patience)
        self.number = number
        self._stay_seconds = config.silence_seconds
        self._channels = [security.channel(address, options) for _ in range(2)]
        control, bulk = self._channels
        calls = (JOIN, MOVE, POLL, POST, STAY)
        self.join, self.move, self.poll, self.post, self._stay = map(control.unary_unary, calls)
        self.push = bulk.stream_unary(PUSH, request_serializer=bytes)
        self.fetch = bulk.unary_stream(FETCH)

    def named(self, metadata: Metadata) -> Metadata:
        """The metadata of a call on this line."""
        return (*metadata, (LINE, str(self.number)))

    def stay(self, metadata: Metadata) -> None:
        """Have a Stay under way from now on, another as soon as the hub has answered one."""

        def renew(answered: grpc.Future) -> None:
            if answered.code() == grpc.StatusCode.OK:
                self.stay(metadata)

        with contextlib.suppress(ValueError):  # it is closed
            call = self._stay.future(b"", timeout=self._stay_seconds, metadata=self.named(metadata))
            call.add_done_callback(renew)

    def close(self) -> None:
        """End all calls under way at once."""
        for channel in self._channels:
            channel.close()


class Redial:
    """The line of one session, which a thread replaces when nothing has been heard on it for too long.

    `dial` opens a line; `on_end` is called if the hub does not know the session any more.
    """

    def __init__(
        self, dial: Callable[[int], HubLine], config: GrpcConfig, on_end: Callable[[str], None]
    ) -> None:
        self.line = dial(0)
        self._dial = dial
        self._on_end = on_end
        self._stall_seconds = 1.5 * config.failure_timeout  # a hub answers a poll within the timeout
        self._has_time = config.silence_seconds > self._stall_seconds
        self._attempt_seconds = config.failure_timeout / 2
        self._pause = config.failure_timeout / 5
        self._heard_at = time.monotonic()
        self._dialled = 0
        self._attempt: HubLine | None = None
        self._changed = threading.Condition()
        self._is_wanted = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal redial", daemon=True)

    def start(self, metadata: Metadata) -> None:
        """The session has begun; its calls have this metadata."""
        self._metadata = metadata
        self.note()
        self.line.stay(metadata)
        if self._has_time:
            self._thread.start()

    def note(self) -> None:
        """The hub has been heard."""
        self._heard_at = time.monotonic()

    def await_other(self, line: HubLine, code: str, deadline: float) -> bool:
        """Whether there is another line than this, on which a call ended with that code.

        Waits for one if the hub has ended the call: it may have heard of an attempt that was given up, or the
        session is over, which the next attempt tells.
        """
        with self._changed:
            if code in OUTDATED and self.line is line and self._has_time:
                self._heard_at, self._is_wanted = float("-inf"), True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.line is not line or self._over.is_set(), _until(deadline))
            return self.line is not line and not self._over.is_set()

    def close(self) -> None:
        """End all calls, and dial no more."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        for line in (self.line, self._attempt):
            if line is not None:
                line.close()

    def join_thread(self) -> None:
        """After `close`: wait for the thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._over.is_set() or self._is_wanted, self._pause)
                self._is_wanted = False
            if time.monotonic() - self._heard_at > self._stall_seconds:
                self._replace()

    def _replace(self) -> None:
        self._dialled += 1
        line = self._attempt = self._dial(self._dialled)
        if self._over.is_set():
            line.close()
            return
        try:
            line.move(b"", timeout=self._attempt_seconds, metadata=line.named(self._metadata))
        except (grpc.RpcError, ValueError) as failure:  # ValueError: it was closed meanwhile
            line.close()
            if isinstance(failure, grpc.RpcError) and failure.code() == grpc.StatusCode.NOT_FOUND:
                self._on_end(_text(failure))
            return
        with self._changed:
            if self._over.is_set():
                line.close()
                return
            old, self.line, self._attempt = self.line, line, None
            self.note()
            self._changed.notify_all()
        line.stay(self._metadata)
        old.close()


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _text(failure: Any) -> str:
    return f"{failure.code().name}: {failure.details() or ''}"
