"""Machine: what costs processor time beside gradients, and how many processors share it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from shoal.sim.models import Network

LARGE_BYTES = 64 * 1024
"""From this size on a message is large."""

FORMAT = 2
"""Of profiles. A profile of another format is refused."""


@dataclass(frozen=True)
class Handling:
    """What a message, or an operation on vectors, costs a processor: `each` seconds, and `byte` a byte.

    From LARGE_BYTES on it costs `large` more: transports treat such messages in another way.
    """

    each: float = 0.0
    byte: float = 0.0
    large: float = 0.0

    def __post_init__(self) -> None:
        if min(self.each, self.byte, self.large) < 0:
            raise ValueError(f"{self}: times must not be negative")

    def __bool__(self) -> bool:
        return max(self.each, self.byte, self.large) > 0

    def of(self, nbytes: int) -> float:
        """Seconds for so many bytes."""
        return self.each + nbytes * self.byte + (self.large if nbytes >= LARGE_BYTES else 0.0)


@dataclass(frozen=True)
class Machine:
    """The hosts that nodes run on, and what costs their processors time beside gradients.

    `per_host` nodes share a host with `cores` processors; by default every node has a host of its own.
    `slowdown[k]` is how many times as long everything takes while k + 1 processes are busy, each on a
    processor of its own: they share caches and memory. `vectors` is what an operation of torch costs outside
    of gradients, by the bytes that it reads and writes: averages, servers and a strategy's own steps consist
    of these. `encode` and `decode` are seconds a byte of the vector that is compressed or unpacked. With
    `maps_memory` the nodes of a host can map each other's memory, as processes of one machine do.
    """

    cores: int = 1
    per_host: int = 1
    slowdown: Sequence[float] = (1.0,)
    send: Handling = field(default_factory=Handling)
    receive: Handling = field(default_factory=Handling)
    vectors: Handling = field(default_factory=Handling)
    encode: float = 0.0
    decode: float = 0.0
    maps_memory: bool = False

    def __post_init__(self) -> None:
        if self.cores < 1 or self.per_host < 1:
            raise ValueError(f"cores={self.cores}, per_host={self.per_host}: both are at least 1")
        if not self.slowdown or any(factor < 1 for factor in self.slowdown):
            raise ValueError(f"slowdown={list(self.slowdown)}: factors are 1 or more")
        if min(self.encode, self.decode) < 0:
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
    vectors: Handling = field(default_factory=Handling)
    transports: Mapping[str, Wiring] = field(default_factory=dict)  # for messages among workers
    servers: Mapping[str, Wiring] = field(default_factory=dict)  # for those to a server and back
    codecs: Mapping[str, Speeds] = field(default_factory=dict)

    def machine(
        self,
        transport: str,
        codec: str = "none",
        per_host: int = 1,
        threads: int = 1,
        has_server: bool = False,
    ) -> Machine:
        """The machine as nodes meet it that use this transport, codec and number of threads.

        A node with several threads takes as many cores. Raises ValueError for what was not measured.
        """
        wiring, speeds = self.wiring(transport, has_server), self.codecs.get(codec)
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
            self.vectors,
            speeds.encode,
            speeds.decode,
            maps_memory=transport == "processes",
        )

    def of_run(
        self, nodes: int, codec: str, network: Network | None, threads: int, has_server: bool
    ) -> tuple[Network, Machine]:
        """How these nodes are connected, and what they run on.

        With a network every node has a machine like this one to itself, and they talk over gRPC; without
        one they are processes of one such machine.
        """
        if network is not None:
            return network, self.machine("grpc", codec, 1, threads, has_server)
        wiring = self.wiring("processes", has_server)
        here = self.machine("processes", codec, nodes, threads, has_server)
        return Network(wiring.latency, wiring.bandwidth), here

    def wiring(self, transport: str, has_server: bool = False) -> Wiring:
        """What was measured of a transport, in runs with a server or without. Raises ValueError if not."""
        measured = self.servers if has_server else self.transports
        if transport not in measured:
            raise ValueError(f"transport {transport!r} was not measured on {self.host}: {_known(measured)}")
        return measured[transport]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        known = {**asdict(self), "format": FORMAT}
        for wiring in (*known["transports"].values(), *known["servers"].values()):
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
            transports, servers = (
                {kind: _wiring(entry) for kind, entry in known.pop(which).items()}
                for which in ("transports", "servers")
            )
            codecs = {word: Speeds(**entry) for word, entry in known.pop("codecs").items()}
            vectors = Handling(**known.pop("vectors"))
            return cls(**known, vectors=vectors, transports=transports, servers=servers, codecs=codecs)
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
