"""Card: who a node is, and how it proves that it knows the run's token, which it never shows.

    callee   a nonce
    caller   its hello, with a nonce of its own, and a proof
    callee   its hello, with its verdict, and a proof

A proof is an HMAC-SHA256 under the token of the port that was called, the other's nonce and the hello. So who
listens where a dead node did learns nothing, and what it hears is of no use elsewhere: another door has
another port, and another call another nonce.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.transports.memory import NOWHERE, Probe

NONCE_BYTES = 16

CALLING, WELCOME, STALE, CROSSED = range(4)
"""Verdicts: that of a caller; come in; a later start of you is known; my own call to you is on its way."""

_PROTOCOL = b"shoal/3\n"
_FIELDS = struct.Struct(f"<8sIHBiiQ{NONCE_BYTES}s")
HELLO_BYTES = _FIELDS.size + 32


class Hello(NamedTuple):
    """What both ends of a connection say of themselves."""

    protocol: bytes
    rank: int
    incarnation: int
    verdict: int
    pid: int  # 0: shares no memory
    fd: int  # open on memory, to try whether the other end can map it
    serial: int
    nonce: bytes


@dataclass(frozen=True)
class Card:
    """Who a node is, and what it knows."""

    rank: int
    size: int
    token: bytes = field(repr=False)
    incarnation: int = 0
    probe: Probe = field(default_factory=lambda: Probe(share=False))

    def hello(
        self, port: int, theirs: bytes, mine: bytes, verdict: int = CALLING, *, shares: bool = True
    ) -> bytes:
        """What to say in a call to that port, given the nonces of both ends."""
        where = self.probe.where if shares else NOWHERE
        fields = _FIELDS.pack(_PROTOCOL, self.rank, self.incarnation, verdict, *where, mine)
        return fields + self._proof(port, theirs, fields)

    def read(self, said: bytes, port: int, mine: bytes) -> Hello | None:
        """What the other end said in such a call; None unless it proves that it knows the token."""
        fields, proof = said[: _FIELDS.size], said[_FIELDS.size :]
        hello = Hello._make(_FIELDS.unpack(fields))
        is_proved = hmac.compare_digest(proof, self._proof(port, mine, fields))
        return hello if is_proved and hello.protocol == _PROTOCOL else None

    def _proof(self, port: int, nonce: bytes, fields: bytes) -> bytes:
        return hmac.digest(self.token, port.to_bytes(2, "little") + nonce + fields, "sha256")
