"""Machine: what costs processor time beside gradients, and how many processors share it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from shoal.sim.models import Network

FORMAT = 1
"""Of profiles. A profile of another format is refused."""


@dataclass(frozen=True)
class Handling:
    """What a message costs the processor of a node: `message` seconds, and `byte` more for each byte."""

    message: float = 0.0
    byte: float = 0.0

    def __post_init__(self) -> None:
        if self.message < 0 or self.byte < 0:
            raise ValueError(f"{self}: times must not be negative")

    def of(self, nbytes: int) -> float:
        """Seconds for a message of so many bytes."""
        return self.message + nbytes * self.byte


@dataclass(frozen=True)
class Machine:
    """The hosts that nodes run on, and what costs their processors time beside gradients.

    `per_host` nodes share a host with `cores` processors; by default every node has a host of its own.
    `slowdown[k]` is how many times as long everything takes while k + 1 processes are busy, each on a
    processor of its own: they share caches and memory. `merge`, `encode` and `decode` are seconds a byte of
    the vector that is merged into another, compressed or unpacked.
    """

    cores: int = 1
    per_host: int = 1
    slowdown: Sequence[float] = (1.0,)
    send: Handling = field(default_factory=Handling)
    receive: Handling = field(default_factory=Handling)
    merge: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        if self.cores < 1 or self.per_host < 1:
            raise ValueError(f"cores={self.cores}, per_host={self.per_host}: both are at least 1")
        if not self.slowdown or any(factor < 1 for factor in self.slowdown):
            raise ValueError(f"slowdown={list(self.slowdown)}: factors are 1 or more")
        if min(self.merge, self.encode, self.decode) < 0:
            raise ValueError(f"{self}: times must not be negative")

    def speed(self, busy: int) -> float:
        """How fast each of so many busy processes of a host is, as a share of one that is alone."""
        return min(1.0, self.cores / busy) / _slower(self.slowdown, min(busy, self.cores))


@dataclass(frozen=True)
class Wiring:
    """One transport on one link: what messages cost the processors at both ends, and the way between."""

    send: Handling = field(default_factory=Handling)
    receive: Handling = field(default_factory=Handling)
    latency: float = 0.0
    bandwidth: float = inf


@dataclass(frozen=True)
class Speeds:
    """Seconds a byte of the uncompressed vector that a codec takes."""

    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Profile:
    """What `shoal calibrate` has measured; a file that can be carried to another machine."""

    host: str
    cores: int
    slowdown: Sequence[float] = (1.0,)
    merge: float = 0.0
    transports: Mapping[str, Wiring] = field(default_factory=dict)
    codecs: Mapping[str, Speeds] = field(default_factory=dict)

    def machine(self, transport: str, codec: str = "none", per_host: int = 1, threads: int = 1) -> Machine:
        """The machine as nodes meet it that use this transport, codec and number of threads.

        A node with several threads takes as many cores. Raises ValueError for what was not measured.
        """
        wiring, speeds = self.wiring(transport), self.codecs.get(codec)
        if speeds is None and codec != "none":
            raise ValueError(f"codec {codec!r} was not measured on {self.host}: {_known(self.codecs)}")
        speeds = speeds or Speeds()
        groups = max(1, self.cores // threads)
        alone = _slower(self.slowdown, threads)
        slowdown = [_slower(self.slowdown, threads * k) / alone for k in range(1, groups + 1)]
        return Machine(
            groups,
            per_host,
            [max(1.0, factor) for factor in slowdown],
            wiring.send,
            wiring.receive,
            self.merge,
            speeds.encode,
            speeds.decode,
        )

    def of_run(
        self, nodes: int, codec: str, network: Network | None, threads: int
    ) -> tuple[Network, Machine]:
        """How these nodes are connected, and what they run on.

        With a network every node has a machine like this one to itself, and they talk over gRPC; without
        one they are processes of one such machine.
        """
        if network is not None:
            return network, self.machine("grpc", codec, 1, threads)
        wiring = self.wiring("processes")
        here = self.machine("processes", codec, nodes, threads)
        return Network(wiring.latency, wiring.bandwidth), here

    def wiring(self, transport: str) -> Wiring:
        """What was measured of a transport. Raises ValueError if nothing was."""
        if transport not in self.transports:
            raise ValueError(
                f"transport {transport!r} was not measured on {self.host}: {_known(self.transports)}"
            )
        return self.transports[transport]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        known = {**asdict(self), "format": FORMAT}
        for wiring in known["transports"].values():
            if wiring["bandwidth"] == inf:
                del wiring["bandwidth"]
        Path(path).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises ValueError with the path for anything else."""
        try:
            known = json.loads(Path(path).read_text(encoding="utf-8"))
            if known.pop("format") != FORMAT:
                raise KeyError("of another format; measure again")
            transports = {kind: _wiring(entry) for kind, entry in known.pop("transports").items()}
            codecs = {word: Speeds(**entry) for word, entry in known.pop("codecs").items()}
            return cls(**known, transports=transports, codecs=codecs)
        except OSError as error:
            raise ValueError(f"profile {path} cannot be read: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no profile of this `shoal calibrate` ({error})") from None


def _slower(slowdown: Sequence[float], busy: int) -> float:
    """How many times as long everything takes while so many cores are busy; the last holds for more."""
    return slowdown[min(busy, len(slowdown)) - 1]


def _wiring(entry: Mapping[str, Any]) -> Wiring:
    send, receive = Handling(**entry["send"]), Handling(**entry["receive"])
    return Wiring(send, receive, entry["latency"], entry.get("bandwidth", inf))


def _known(measured: Mapping[str, Any]) -> str:
    return f"it knows {', '.join(sorted(measured))}" if measured else "it knows none"
