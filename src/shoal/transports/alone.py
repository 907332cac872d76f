"""Alone: the transport of a run with a single node."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from shoal.core.transport import Message


class Alone:
    """A clock without a network."""

    rank = 0
    size = 1
    incarnations: Mapping[int, int] = {}

    def now(self) -> float:
        """Seconds on this host's monotonic clock."""
        return time.perf_counter()

    async def send(self, dst: int, m: Message) -> None:
        """Raise ValueError: there is no other node."""
        raise ValueError(f"there is no node {dst}: this process is the only one of its run")

    async def recv(self, timeout: float | None = None) -> Message:
        """Raise ValueError: no message can arrive."""
        raise ValueError("this process is the only one of its run: nothing will ever arrive")

    def drain(self) -> Iterator[Message]:
        """Yield nothing."""
        return iter(())

    async def sleep(self, seconds: float) -> None:
        """Let real time pass."""
        time.sleep(seconds)

    async def close(self) -> None:
        """Nothing to release."""
