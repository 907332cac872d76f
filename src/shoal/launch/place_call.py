"""PlaceCall: a process's hold on a place in a run that is under way elsewhere."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc

from shoal.core.errors import ShoalError, Unavailable
from shoal.launch.join import Access
from shoal.launch.open_places import read_words
from shoal.launch.versions import version
from shoal.transports.grpc.hub_protocol import HANDSHAKE_SECONDS, PLACE, channel_options
from shoal.transports.grpc.security import Security, bearer, split_address
from shoal.transports.rendezvous import is_loopback

FAILURE_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""How long to wait before the call is made again after the run's keeper was lost."""

_Events = queue.SimpleQueue[bytes | None]

HINTS = {
    "UNAUTHENTICATED": "it does not know this token; take that of the run, with --token-file or SHOAL_TOKEN",
    "UNIMPLEMENTED": "it is no run that can be joined, or one of an older Shoal",
    "DEADLINE_EXCEEDED": "nobody answers there; is the run over, or the address wrong?",
    "UNAVAILABLE": "nobody answers there; is the run over, or the address wrong?",
}
"""What a failed call means, by gRPC's status code; other codes bring their own sentence."""


class PlaceCall:
    """Asks the run at `address` for a place, and holds it until `close`. Raises Unavailable with the reason.

    `granted` is what the run tells of itself and of the place. If the run's keeper is away, or the network,
    the call is made again on a new connection: the one that there was may wait a minute before it tries.
    `lost_for` says for how long the run has been away.
    """

    def __init__(self, address: str, access: Access) -> None:
        settings = asdict(access)
        del settings["listen"], settings["advertise"]
        security = Security(**settings)
        host, _ = split_address(address)
        if security.authority is None and not (is_loopback(host) or security.insecure):
            raise ValueError(
                f"{host} is another host: give --authority, the certificate authority of the run, or "
                "--insecure if it was started with that"
            )
        if not (tokens := security.secrets()):
            raise ValueError("a run is joined with its token; give it with --token-file, or in SHOAL_TOKEN")
        self.address = address
        self._metadata = bearer(tokens)
        self._dial = partial(security.channel, address, channel_options(FAILURE_SECONDS, None))
        self._channel = self._dial()
        self._asked: dict[str, Any] = {"version": version()}
        self._events = _Events()
        self._lost_at = math.inf
        self._closing = threading.Event()
        try:
            self.granted = self._ask(self._channel)
        except BaseException:
            self._channel.close()
            raise
        self._asked |= {name: self.granted[name] for name in ("rank", "secret")}
        self._thread = threading.Thread(target=self._hold, name="shoal place", daemon=True)
        self._thread.start()

    @property
    def lost_for(self) -> float:
        """Seconds since the run was last heard of; 0 while it is there."""
        return max(0.0, time.monotonic() - self._lost_at)

    def tell(self, event: dict[str, Any]) -> None:
        """Have the run's launcher hear of an event. Those of a time when the run is away are lost."""
        self._events.put(json.dumps(event).encode())

    def close(self) -> None:
        """Give the place back, after all events have been sent if the run is there."""
        self._closing.set()
        self._events.put(None)
        self._thread.join(HANDSHAKE_SECONDS)
        self._channel.close()

    def _ask(self, channel: Any) -> dict[str, Any]:
        """Make the call on that channel, and wait for what is granted."""
        self._events.put(None)  # ends those of a call before this one
        self._events = _Events()
        self._call = channel.stream_stream(PLACE)(self._said(self._events), metadata=self._metadata)
        watch = threading.Timer(HANDSHAKE_SECONDS, self._call.cancel)
        watch.start()
        try:
            return read_words(next(self._call))
        except grpc.RpcError as error:
            self._events.put(None)
            raise Unavailable(f"{self.address}: {self._why(error)}") from None
        except StopIteration:
            self._events.put(None)
            raise Unavailable(f"{self.address}: it ends") from None
        finally:
            watch.cancel()

    def _why(self, error: Any) -> str:
        code = error.code().name
        if "handshake failed" in (error.details() or "") or "Ssl" in (error.details() or ""):
            return "the certificates do not fit; take --authority of the run, and --certificate if it asks"
        if code == "CANCELLED":
            return HINTS["DEADLINE_EXCEEDED"]
        return HINTS.get(code) or str(error.details())

    def _said(self, events: _Events) -> Iterator[bytes]:
        yield json.dumps(self._asked).encode()
        while (event := events.get()) is not None:
            yield event

    def _hold(self) -> None:
        """Keep the call until `close`; make it again when the run's keeper was lost."""
        while True:
            with contextlib.suppress(grpc.RpcError):
                for _ in self._call:
                    pass
            self._lost_at = min(self._lost_at, time.monotonic())
            if self._closing.wait(AGAIN_SECONDS):
                return
            self._redial()

    def _redial(self) -> None:
        """Make the call again on a new connection, if the run answers there."""
        try:
            channel = self._dial()
        except (OSError, ShoalError):  # the files of the run's authority are not there any more
            return
        try:
            self._ask(channel)
        except ShoalError:
            channel.close()
            return
        before, self._channel = self._channel, channel
        before.close()
        self._lost_at = math.inf
        if self._closing.is_set():  # and what `close` put an end to was the call before
            self._events.put(None)
