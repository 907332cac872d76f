"""Endpoint: the base class of the real transports."""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import JOINED, LEFT, LOST, NOTICES, Message
from shoal.transports import frames
from shoal.transports.frames import Shape

CLOSING_SECONDS = 5.0
"""How long `close` waits for peers that do not answer its goodbye."""


class Endpoint(ABC):
    """One node's end of a real network: the clock, the inbox, and the checks on what is sent.

    The coroutines never suspend. They block, so one `send(None)` runs each to its end.
    `reasons` maps each lost peer to why it was lost. `notices_silence` says whether a peer that says nothing
    more, though its process lives, is lost in the end: by the transport itself, or by the launcher.
    """

    notices_silence = True

    def __init__(self, rank: int, size: int, limit_bytes: int) -> None:
        self.rank = rank
        self.size = size
        self.limit_bytes = limit_bytes
        self.reasons: dict[int, str] = {}
        self.incarnations: dict[int, int] = {}  # of peers that this node has met
        self._arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._closing = False

    def now(self) -> float:
        """Seconds on this host's monotonic clock."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Let real time pass; messages continue to arrive."""
        time.sleep(seconds)

    async def send(self, dst: int, m: Message) -> None:
        """Hand `m` to the network. Waits until the tensors are copied, never until `dst` receives."""
        header, parts = self._checked(dst, m)
        if dst == self.rank:
            copy = replace(m, parts=tuple(part.clone() for part in parts), src=self.rank, release=None)
            self._arrived.put(copy)
        else:
            self._transmit(dst, header, parts)

    async def recv(self, timeout: float | None = None) -> Message:
        """The next message in order of arrival. Raises TimeoutError after `timeout` seconds."""
        try:
            return self._taken(self._arrived.get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError(f"node {self.rank} received nothing for {timeout:g} s") from None

    def drain(self) -> Iterator[Message]:
        """The messages that have arrived so far; never waits."""
        while True:
            try:
                m = self._arrived.get_nowait()
            except queue.Empty:
                return
            yield self._taken(m)

    @abstractmethod
    async def close(self) -> None:
        """Say goodbye to all peers, wait for messages under way, release all resources."""

    @abstractmethod
    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Move one frame to another node; do nothing if that node is gone."""

    def _taken(self, m: Message) -> Message:
        """Called with each message just before the algorithm receives it."""
        return m

    def _checked(self, dst: int, m: Message) -> tuple[bytes, tuple[Tensor, ...]]:
        """The header and the flattened parts of `m`. Raises ValueError if it cannot be sent."""
        if not 0 <= dst < self.size:
            raise ValueError(f"there is no node {dst}: nodes are 0 to {self.size - 1}")
        if m.tag in NOTICES:
            raise ValueError(f"tag '{m.tag}' is the transport's own notice; choose another")
        parts = self._flatten(m.parts)
        header = frames.encode(m, parts, self.rank)
        nbytes = sum(part.nbytes for part in parts)
        if nbytes > self.limit_bytes:
            raise ValueError(
                f"message '{m.tag}' to node {dst} has {nbytes:,} bytes, limit_bytes is {self.limit_bytes:,}: "
                "raise it on every node, or send less at once"
            )
        return header, parts

    def _flatten(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parts as `_transmit` takes them."""
        return frames.flatten(parts)

    def _decode(self, peer: int, header: bytes | bytearray | memoryview) -> tuple[Message, list[Shape]]:
        message, shapes = frames.decode(header, self.limit_bytes)
        if message.src != peer or message.tag in (LOST, JOINED):
            raise WireError(f"node {peer} sent a message '{message.tag}' in the name of node {message.src}")
        return message, shapes

    def _goodbye(self) -> bytes:
        return frames.encode(Message(LEFT), (), self.rank)

    def _announce(self, peer: int, lost: BaseException | None) -> None:
        """Deliver LEFT, or LOST with its reason: the last message from `peer`."""
        if lost is None:
            self._arrived.put(Message(LEFT, src=peer))
        elif not self._closing:  # a node that is leaving need not hear how its peers disconnect
            self.reasons.setdefault(peer, str(lost))
            self._arrived.put(Message(LOST, src=peer))
