"""Models of networks and machines, which say how long things take in virtual time, and their text form."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from shoal.core.seeds import derive

_TIME = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}  # in a second: dividing by these is exact
_BIT_RATE = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTE_RATE = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
NETWORKS = {
    "datacentre": "10Gbit,50us",
    "office": "1Gbit,200us",
    "old-office": "100Mbit,300us",
    "wifi": "100Mbit,4ms,1%",
    "home": "20/5Mbit,30ms",
    "continents": "1Gbit,80ms",
}
"""Networks that many have, by name."""

_BYTES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30} | _BYTE_RATE


def quantity(text: str) -> tuple[float, str]:
    """Parse text such as '1.5Gbit' or '100us' into a number and its unit in lower case."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*([a-zA-Z%]*)\s*", text)
    try:
        if match is None:
            raise ValueError
        return float(match[1]), match[2].lower()
    except ValueError:
        raise ValueError(f"{text!r} is not a number with a unit, such as 20ms or 1Gbit") from None


def seconds(text: str) -> float:
    """Parse a duration such as '20ms' into seconds."""
    value, unit = quantity(text)
    if unit not in _TIME:
        raise ValueError(f"{text!r} is not a duration; write it as 20ms, 100us or 1.5s")
    return value / _TIME[unit]


def byte_count(text: str) -> int:
    """Parse a size such as '16GB' or '24GiB' into bytes."""
    value, unit = quantity(text)
    if unit not in _BYTES:
        raise ValueError(f"{text!r} is not a size of memory; write it as 16GB, 24GiB or 800MB")
    return round(value * _BYTES[unit])


@dataclass(frozen=True)
class Link:
    """Latency in seconds and bandwidth in bytes per second from one node to another."""

    latency: float = 0.0
    bandwidth: float = inf

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(f"{self}: latency must not be negative, bandwidth must be positive")


def _times_faster(part: str, down: str, up: float, unit: str) -> float:
    """How many times as fast '20/5Mbit' receives as it sends."""
    if not up or unit not in _BIT_RATE | _BYTE_RATE or not re.fullmatch(r"\s*[0-9.]+\s*", down):
        raise ValueError(f"{part!r} is not a rate to receive and one to send, such as 20/5Mbit")
    return quantity(down)[0] / up


@dataclass(frozen=True, slots=True)
class Network:
    """Links between nodes; each node sends one message at a time and receives one at a time.

    A message of n bytes arrives latency + n / bandwidth after its sender's port is free, later if the
    receiver's port is busy. With probability `loss` it is sent again `retry` seconds later, as TCP would:
    loss delays messages, it never drops or reorders them. `links` overrides the link of a pair (src, dst).
    Nodes receive `download` times as fast as they send, as homes do.
    """

    latency: float = 0.0
    bandwidth: float = inf
    loss: float = 0.0
    retry: float = 0.2
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    download: float = 1.0

    def __post_init__(self) -> None:
        Link(self.latency, self.bandwidth)
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss} must be at least 0 and below 1")
        if self.retry < 0:
            raise ValueError(f"retry={self.retry} must not be negative")
        if self.download < 1:
            raise ValueError(f"download={self.download}: nodes receive at least as fast as they send")

    @classmethod
    def parse(cls, text: str) -> Network:
        """Read '1Gbit,100us', '100Mbit,20ms,1%' (the last is the loss), or a word of NETWORKS.

        '20/5Mbit' is 20 to receive and 5 to send.
        """
        latency, bandwidth, loss, download = 0.0, inf, 0.0, 1.0
        if (text := NETWORKS.get(text, text)).isalpha():
            raise ValueError(f"there is no network {text!r}; write 1Gbit,100us, or {', '.join(NETWORKS)}")
        for part in text.split(","):
            down, slash, up = part.rpartition("/")
            value, unit = quantity(up)
            if slash:
                download = _times_faster(part, down, value, unit)
            if unit in _TIME:
                latency = value / _TIME[unit]
            elif unit in _BIT_RATE:
                bandwidth = value * _BIT_RATE[unit] / 8
            elif unit in _BYTE_RATE:
                bandwidth = value * _BYTE_RATE[unit]
            elif unit == "%":
                loss = value / 100
            else:
                raise ValueError(
                    f"{part!r} in network {text!r} has no known unit; write 1Gbit,100us or 100Mbit,20ms,1%"
                )
        return cls(latency, bandwidth, loss, download=download)

    def link(self, src: int, dst: int) -> Link:
        """The link from `src` to `dst`."""
        return self.links.get((src, dst)) or Link(self.latency, self.bandwidth)


class Wires:
    """The state of a network: when each port is free again."""

    def __init__(self, network: Network, seed: int) -> None:
        self._network = network
        self._uniform = not network.links
        self._random = random.Random(derive(seed, "network"))
        self._out_free: dict[int, float] = {}
        self._in_free: dict[int, float] = {}
        self._last_head: dict[tuple[int, int], float] = {}

    def leave(self, src: int, dst: int, nbytes: int, now: float) -> tuple[float, float]:
        """Occupy the sender's port with a message.

        Returns the time at which the head of the message reaches the receiver, and its length in seconds.
        """
        network = self._network
        if self._uniform:
            latency, length = network.latency, nbytes / network.bandwidth
        else:
            link = network.link(src, dst)
            latency, length = link.latency, nbytes / link.bandwidth
        free = self._out_free.get(src, 0.0)
        start = now if now > free else free
        self._out_free[src] = start + length
        head = start + latency
        if network.loss:
            while self._random.random() < network.loss:
                head += network.retry
            head = max(head, self._last_head.get((src, dst), 0.0))  # messages after a lost one wait for it
            self._last_head[src, dst] = head
        return head, length

    def enter(self, dst: int, length: float, now: float) -> float:
        """Occupy the receiver's port with a message whose head arrives now. Returns when its tail arrives."""
        tail, behind = now + length, self._in_free.get(dst, 0.0) + length / self._network.download
        self._in_free[dst] = tail = behind if behind > tail else tail
        return tail


@dataclass(frozen=True, slots=True)
class Compute:
    """How long a gradient takes: `mean` seconds, with a spread of `jitter` (standard deviation over mean).

    `slow` multiplies the time of single workers: {2: 5.0} makes worker 2 five times slower. Where batches
    differ in size, `fixed` is the share of the time that does not depend on it.
    """

    mean: float = 0.0
    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.fixed <= 1:
            raise ValueError(f"fixed={self.fixed} is a share of the time, from 0 to 1")
        if self.mean < 0 or self.jitter < 0 or any(factor <= 0 for factor in self.slow.values()):
            raise ValueError(f"{self}: times must not be negative, factors must be positive")

    def of(self, samples: int, batch: int) -> float:
        """How long so many samples take, as a multiple of what `batch` samples do."""
        return self.fixed + (1 - self.fixed) * samples / batch

    def check(self, workers: int) -> None:
        """Raise ValueError if `slow` names a worker that does not exist."""
        for rank in self.slow:
            if not 0 <= rank < workers:
                raise ValueError(f"there is no worker {rank} to slow down: workers are 0 to {workers - 1}")

    @classmethod
    def parse(cls, text: str) -> Compute:
        """Read '20ms', '20ms,10%' (with jitter) or '20ms,10%,2:5x' (worker 2 takes five times as long)."""
        first, *rest = text.split(",")
        jitter, slow = 0.0, {}
        for part in rest:
            rank, colon, factor = part.rpartition(":")
            value, unit = quantity(factor)
            if colon and unit == "x" and rank.strip().isdigit():
                slow[int(rank)] = value
            elif not colon and unit == "%":
                jitter = value / 100
            else:
                raise ValueError(
                    f"{part!r} in compute {text!r} is neither a jitter as 10% nor a slow worker as 2:5x"
                )
        return cls(seconds(first), jitter, slow)


class Pace:
    """The durations of one worker's gradients."""

    def __init__(self, compute: Compute, rank: int, seed: int) -> None:
        self._mean = compute.mean * compute.slow.get(rank, 1.0)
        self._jitter = compute.jitter
        self._random = random.Random(derive(seed, "durations", rank))
        self.is_new = True  # until it knows where to begin

    def begin_at(self, place: int) -> None:
        """Skip the durations of the first `place` gradients, which a resumed run has computed already."""
        for _ in range(place if self._jitter else 0):
            self.next()
        self.is_new = False

    def next(self) -> float:
        """Seconds that the next gradient takes, at least a tenth of the mean."""
        if not self._jitter:
            return self._mean
        return self._mean * max(0.1, self._random.gauss(1.0, self._jitter))
