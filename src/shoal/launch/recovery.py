"""Recovery: which nodes come back after they died, and what of a server outlives its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.identity import NodeIdentity
from shoal.core.vector import Layout
from shoal.core.words import REJOINING
from shoal.storage.journal import Journal

RECOVERY_SECONDS = 60.0
"""How long workers wait for a server that died to come back."""


def message_limit(vector_bytes: int) -> int:
    """Bytes of the largest message: a codec may need more than the vector itself, but not much more."""
    return 2 * vector_bytes + 2**20


@dataclass(frozen=True)
class Recovery:
    """How the nodes of a run come back. A server's journal lies in `folder`; without one none comes back."""

    transport: str
    durability: str = "memory"
    folder: str = ""

    @property
    def rejoins(self) -> bool:
        """Whether a node that died can come back."""
        return self.transport in REJOINING and bool(self.folder)

    def settings(self, me: NodeIdentity, layout: Layout, vector_bytes: int) -> dict[str, Any]:
        """What an Engine is told of it."""
        log = None
        if me.is_server and self.rejoins:
            folder = Path(self.folder) / f"server-{me.rank - me.workers}"
            log = Journal(folder, self.durability, message_limit(vector_bytes))
        return {
            "recovery": RECOVERY_SECONDS if self.rejoins else 0.0,
            "log": log,
            "layout": layout,
            "begins": me.own_slice(layout.numel).start if me.is_server else 0,
        }
