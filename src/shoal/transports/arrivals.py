"""Arrivals: what has come for one node, with the notices about its peers in their proper order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from shoal.core.transport import JOINED, LEFT, LOST, Message


class Arrivals:
    """The way into a node's inbox. A peer is here, lost or left, and only a change of that is told.

    LOST or LEFT comes once, JOINED only after one of them. A peer that has not been heard of yet comes
    without a word. Each stay of a peer has a number, so that two of them are never taken for one.
    """

    def __init__(self, deliver: Callable[[Message], None], reasons: dict[int, str]) -> None:
        self.deliver = deliver
        self._reasons = reasons
        self._lock = threading.Lock()
        self._here: dict[int, tuple[int, int]] = {}  # peer -> its incarnation and stay
        self._gone: set[int] = set()
        self._untaken: Counter[int] = Counter()  # peer -> notices of its return that nobody has read yet
        self._acquainted: set[int] = set()

    def is_reachable(self, peer: int) -> bool:
        """Whether a message to `peer` reaches the one that the algorithm knows.

        Not when it has come back and the algorithm has not read so: what it says is not meant for that one.
        """
        return peer not in self._gone and not self._untaken[peer]

    def stay_of(self, peer: int) -> int:
        """The number of the stay of `peer`, if it is here."""
        return self._here.get(peer, (0, 0))[1]

    def acquaint(self, peer: int) -> None:
        """Take note that something is exchanged with `peer`."""
        self._acquainted.add(peer)

    def came(self, peer: int, incarnation: int, stay: int = 0) -> None:
        """`peer` is here; if it was gone, or this is another stay, that is told."""
        with self._lock:
            known = self._here.get(peer)
            if known is not None and known != (incarnation, stay):
                self._go(LOST, peer, "it came anew")
            self._here[peer] = incarnation, stay
            if peer in self._gone:
                self._untaken[peer] += 1
                self._gone.discard(peer)
                self.deliver(Message(JOINED, src=peer, incarnation=incarnation))

    def left(self, peer: int) -> None:
        """`peer` has closed its transport."""
        with self._lock:
            self._go(LEFT, peer, "")

    def lost(self, peer: int, reason: str) -> None:
        """`peer` has vanished."""
        with self._lock:
            self._go(LOST, peer, reason)

    def cut_off(self, peer: int, reason: str) -> None:
        """There is no way to `peer` any more. Nobody needs to hear that with whom it was not used."""
        with self._lock:
            if peer in self._acquainted:
                self._go(LOST, peer, reason)
            self._here.pop(peer, None)

    def taken(self, m: Message) -> None:
        """The algorithm reads this message now."""
        if m.tag == JOINED:
            with self._lock:
                self._untaken[m.src] -= 1

    def _go(self, tag: str, peer: int, reason: str) -> None:
        if peer in self._gone:
            return
        self._gone.add(peer)
        self._acquainted.discard(peer)
        self._here.pop(peer, None)
        if tag == LOST:
            self._reasons[peer] = reason
        self.deliver(Message(tag, src=peer))
