"""What stands between a node and a hub, and can go dead."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from shoal.transports.grpc.security import join_address, split_address


class Forwarder:
    """Passes bytes on to an address. What it holds can go dead; new connections work."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address("127.0.0.1", self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._alive = threading.Event()  # of the connections there are; each knows its own
        self._alive.set()
        self._left: int | None = None  # bytes until they go dead
        self._start(self._accept)

    def go_dead(self, after: int = 0) -> None:
        """Pass on so many bytes more, and then nothing on the connections that there are."""
        self._left = after
        if not after:
            self._die()

    def close(self) -> None:
        with self._listener:
            self._listener.shutdown(socket.SHUT_RDWR)  # who waits there goes on
            self._threads[0].join()
        for one in self._sockets:
            with one, contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _die(self) -> None:
        self._alive.clear()
        self._alive = threading.Event()
        self._alive.set()
        self._left = None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self._sockets.append(caller)
                called = socket.create_connection(self._target)
                self._sockets.append(called)
                for ends in ((caller, called), (called, caller)):
                    self._start(self._pass_on, *ends, self._alive)

    def _pass_on(self, source: socket.socket, sink: socket.socket, alive: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._left is not None and alive is self._alive:
                    self._left -= len(data)
                    if self._left < 0:
                        self._die()
                if not alive.is_set():
                    return  # and nobody reads here any more
                sink.sendall(data)
