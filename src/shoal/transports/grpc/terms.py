"""Terms: what the nodes of one run agree on, and who each of them is."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field

from shoal.transports.grpc.control_pb2 import Hello
from shoal.transports.grpc.wire import PROTOCOL

_RUN_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Terms:
    """One node's place in the run. All nodes have the same terms but for `rank` and `incarnation`."""

    rank: int
    size: int
    hubs: tuple[int, ...]
    run_id: str = field(repr=False)  # where there is no token, knowing it is what lets a node in
    manifest: str
    limit_bytes: int
    timeout: float
    failure_timeout: float
    incarnation: int = 0
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} is not one of the {self.size} nodes")
        if not self.hubs or len({*self.hubs}) < len(self.hubs) or not {*self.hubs} <= {*range(self.size)}:
            raise ValueError(f"hubs={self.hubs} must name one or more different ranks below {self.size}")
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError("run_id must be 32 hexadecimal digits, as secrets.token_hex(16) makes them")
        if min(self.limit_bytes, self.timeout, self.failure_timeout) <= 0 or self.incarnation < 0:
            raise ValueError(f"limit_bytes, timeout and failure_timeout must be positive: {self}")

    @property
    def relay(self) -> int:
        """The hub that passes on what nodes without a line to each other say."""
        return self.hubs[0]

    @property
    def leaves(self) -> frozenset[int]:
        """The nodes that are no hubs."""
        return frozenset(range(self.size)) - {*self.hubs}

    @property
    def dials(self) -> tuple[int, ...]:
        """The hubs that this node calls: all of them, or those below it if it is one itself."""
        return tuple(hub for hub in self.hubs if self.rank not in self.hubs or hub < self.rank)

    @property
    def expects(self) -> frozenset[int]:
        """The nodes that call this one."""
        if self.rank not in self.hubs:
            return frozenset()
        return self.leaves | {hub for hub in self.hubs if hub > self.rank}

    def hello(self) -> Hello:
        """How this node introduces itself."""
        return Hello(
            protocol=PROTOCOL,
            run_id=self.run_id,
            manifest=self.manifest,
            size=self.size,
            hubs=self.hubs,
            limit_bytes=self.limit_bytes,
            failure_timeout=self.failure_timeout,
            rank=self.rank,
            incarnation=self.incarnation,
            nonce=self.nonce,
        )

    def objection(self, theirs: Hello) -> str | None:
        """Why a node that says this cannot take part; None if it can. The run id itself is never told."""
        if not hmac.compare_digest(theirs.run_id.encode(), self.run_id.encode()):
            return "the run ids differ: this is another run"
        ours = self.hello()
        for name in ("protocol", "size", "hubs", "limit_bytes", "failure_timeout", "manifest"):
            their, our = getattr(theirs, name), getattr(ours, name)
            if their != our:
                return f"node {theirs.rank} has {name} {their!r}, node {self.rank} has {our!r}"
        if theirs.rank not in self.expects:
            return f"node {self.rank} does not expect a call of node {theirs.rank}"
        return None
