"""Meter: the running totals of one node."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

MOST_PEERS = 16
"""Peers whose waiting times a summary lists: a thousand workers with a thousand peers each fill megabytes."""


@dataclass(slots=True)
class Meter:
    """Running totals of one node in seconds and bytes; samples are in `Progress`."""

    steps: int = 0  # done here, batches of other workers included
    loss: float = float("nan")
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    send_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    dense_bytes: int = 0  # of the vectors that were compressed, as often as they were sent
    coded_bytes: int = 0  # what travelled for them
    saved_seconds: float = 0.0  # by that, less what encoding and decoding took; an estimate
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    dropped: int = 0  # gradients that came too late to count
    waited_for: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # rank -> s
    staleness: Counter[int] = field(default_factory=Counter)  # versions behind -> updates
    faults: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Start over, in place: the node's parts hold on to this meter."""
        self.__init__()  # type: ignore[misc]

    def summary(self) -> dict[str, Any]:
        """The totals as plain numbers, for JSON; of many peers those it waited for longest."""
        longest = sorted(self.waited_for.items(), key=lambda item: -item[1])[:MOST_PEERS]
        return {
            "steps": self.steps,
            "loss": self.loss,
            "compute_seconds": self.compute_seconds,
            "wait_seconds": self.wait_seconds,
            "send_seconds": self.send_seconds,
            "encode_seconds": self.encode_seconds,
            "decode_seconds": self.decode_seconds,
            "dense_bytes": self.dense_bytes,
            "coded_bytes": self.coded_bytes,
            "saved_seconds": self.saved_seconds,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages_sent": self.messages_sent,
            "dropped": self.dropped,
            "waited_for": {str(rank): seconds for rank, seconds in sorted(longest)},
            "staleness": {str(late): updates for late, updates in sorted(self.staleness.items())},
            "faults": self.faults,
        }
