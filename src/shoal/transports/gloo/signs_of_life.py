"""SignsOfLife: small messages by which nodes that say nothing else know that the others are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

SLOWEST = 1e6
"""Bytes a second that what is under way is expected to make at least, beyond the patience."""

SIGNS = 6
"""Signs of life that a peer sends in the time after which it counts as lost."""


class SignsOfLife:
    """Sends signs of life to every peer, and notices which of them send none for `patience` seconds.

    `send` tells a peer that this node is there, without waiting; `lose` is called, once, for one that is
    silent.
    """

    def __init__(
        self,
        name: str,
        peers: Iterable[int],
        patience: float,
        send: Callable[[int], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._patience, self._send, self._lose = patience, send, lose
        self._lock = threading.Lock()
        self._deadlines = {peer: time.monotonic() + patience for peer in peers}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} signs of life", daemon=True)
        self._thread.start()

    def heard(self, peer: int, under_way: int = 0) -> None:
        """A peer has said something, and so many bytes may follow before it can say something else."""
        with self._lock:
            if peer in self._deadlines:
                self._deadlines[peer] = time.monotonic() + self._patience + under_way / SLOWEST

    def forget(self, peer: int) -> None:
        """A peer has gone."""
        with self._lock:
            self._deadlines.pop(peer, None)

    def end(self) -> None:
        """Send no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        pause, before = self._patience / SIGNS, time.monotonic()
        while not self._is_over.wait(pause):
            now = time.monotonic()
            stopped = max(0.0, now - before - 3 * pause)  # this process: not the peers' fault
            before = now
            for peer in list(self._deadlines):
                self._send(peer)
            for peer in self._silent(now, stopped):
                self._lose(peer, self._reason)

    def _silent(self, now: float, stopped: float) -> list[int]:
        """Those whose time is over, which are forgotten; the others have so much longer."""
        with self._lock:
            silent = [peer for peer, deadline in self._deadlines.items() if now > deadline + stopped]
            self._deadlines = {
                peer: deadline + stopped for peer, deadline in self._deadlines.items() if peer not in silent
            }
        return silent

    @property
    def _reason(self) -> str:
        return f"it gave no sign of life for {self._patience:g} s: is it frozen, or the network down?"
