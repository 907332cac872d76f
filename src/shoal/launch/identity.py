"""Seat: one node's place among the others, and what of it outlives its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.core.replica import Parameters
from shoal.core.vector import Layout
from shoal.core.words import REJOINING
from shoal.engine.client import slice_of
from shoal.storage.journal import Journal

RECOVERY_SECONDS = 60.0
"""How long workers wait for a server that died to come back."""


def message_limit(vector_bytes: int) -> int:
    """Bytes of the largest message: a codec may need more than the vector itself, but not much more."""
    return 2 * vector_bytes + 2**20


@dataclass(frozen=True)
class Seat:
    """Workers come first, then `servers` times `shards` nodes that serve. A server's log lies in `folder`."""

    rank: int
    workers: int
    servers: int = 0
    shards: int = 1
    incarnation: int = 0
    durability: str = "memory"
    folder: str = ""

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return self.workers + self.servers * self.shards

    @property
    def serves(self) -> bool:
        """Whether this node is a server."""
        return self.rank >= self.workers

    def parameters(self, x: Tensor) -> Parameters:
        """What a server holds of the vector `x`."""
        return Parameters(x[self._slice(x.numel())].clone())

    def settings(self, transport: str, layout: Layout, vector_bytes: int) -> dict[str, Any]:
        """What a Node is told of its place."""
        rejoins = transport in REJOINING and bool(self.folder)
        log = None
        if self.serves and rejoins:
            folder = Path(self.folder) / f"server-{self.rank - self.workers}"
            log = Journal(folder, self.durability, message_limit(vector_bytes))
        return {
            "workers": self.workers,
            "servers": self.servers,
            "shards": self.shards,
            "incarnation": self.incarnation,
            "recovery": RECOVERY_SECONDS if rejoins else 0.0,
            "log": log,
            "layout": layout,
            "begins": self._slice(layout.numel).start if self.serves else 0,
        }

    def _slice(self, numel: int) -> slice:
        return slice_of((self.rank - self.workers) % self.shards, self.shards, numel)
