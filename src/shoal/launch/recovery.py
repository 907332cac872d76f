"""Recovery: which nodes restart after a crash, and where a server keeps its journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.identity import NodeIdentity
from shoal.core.vector import Layout
from shoal.storage.journal import Journal
from shoal.vocabulary.strategy import Strategy

RECOVERY_SECONDS = 60.0
"""How long workers wait for a crashed server to restart, and a server without workers for one of them."""


def message_limit(vector_bytes: int) -> int:
    """Most bytes of a message. A codec's payload may be larger than the vector itself, but not by much."""
    return 2 * vector_bytes + 2**20


def peers_return(strategy: Strategy) -> bool:
    """Whether workers without a server and without common averages take back one that was killed."""
    return strategy.survives and not strategy.independent


@dataclass(frozen=True)
class Recovery:
    """How the nodes of a run restart. Servers keep journals in `folder`; without it they do not restart."""

    durability: str = "memory"
    folder: str = ""
    workers_return: bool = False  # whether workers restart, whatever servers do

    @property
    def servers_return(self) -> bool:
        """Whether a crashed server restarts and joins the run again."""
        return bool(self.folder)

    def settings(self, me: NodeIdentity, layout: Layout, vector_bytes: int) -> dict[str, Any]:
        """The arguments of Engine for the node `me` of a model with this layout and size."""
        log = None
        waits = self.servers_return or (me.is_server and self.workers_return)
        if me.is_server and self.servers_return:
            folder = Path(self.folder) / f"server-{me.rank - me.workers}"
            log = Journal(folder, self.durability, message_limit(vector_bytes))
        return {
            "recovery": RECOVERY_SECONDS if waits else 0.0,
            "log": log,
            "layout": layout,
            "begins": me.own_slice(layout.numel).start if me.is_server else 0,
        }
