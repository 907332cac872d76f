"""SavedCrew: who wrote a checkpoint. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.core.identity import NodeIdentity


@dataclass(frozen=True)
class SavedCrew:
    """The workers that batches were dealt to when a checkpoint was written, and how many nodes served.

    `workers` were started, some of which may have been away. While averages are `open`, which were begun and
    not completed, nobody else could take part in them. `samples` are those that this node has given to
    the model, at a server those that all have; `merged` those of all, where workers come and go. A server
    says which clock of each worker it has heard with a push, and the first how many batches of each are in.
    """

    workers: int
    members: tuple[int, ...]
    servers: int
    is_open: bool
    samples: float = 0.0
    merged: float | None = None
    pushed: dict[str, int] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, me: NodeIdentity, state: Mapping[str, Any]) -> SavedCrew:
        """The crew of a node that saves this state."""
        crew = state.get("crew", {"members": range(me.workers), "open": 0})
        heard = state.get("service", {"pushed": {}, "pool": None})
        given = [lot["clock"] for lot in (heard["pool"] or {}).get("lots", ())]
        counts = state.get("counts", {"given": 0.0, "merged": None})
        return cls(
            workers=me.workers,
            members=tuple(crew["members"]),
            servers=me.nodes - me.workers,
            is_open=crew["open"] > 0,
            samples=counts["given"],
            merged=counts["merged"],
            pushed=heard["pushed"],
            given=given,
        )

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> SavedCrew:
        """The crew that `plain` gave."""
        return cls(**{**saved, "members": tuple(saved["members"])})

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def is_that_of(self, me: NodeIdentity) -> bool:
        """Whether the nodes of this run are the same."""
        return self.members == tuple(range(me.workers)) and self.servers == me.nodes - me.workers

    @property
    def nodes(self) -> list[NodeIdentity]:
        """Those that wrote the checkpoint."""
        return [*map(self.identity, self.members), *self.server_nodes]

    @property
    def server_nodes(self) -> list[NodeIdentity]:
        """Those of them that served."""
        return [self.identity(self.workers + k) for k in range(self.servers)]

    def identity(self, rank: int) -> NodeIdentity:
        """The node of that rank then."""
        return NodeIdentity(rank, self.workers, 1 if self.servers else 0, max(1, self.servers))

    def describe_change(self, step: int, me: NodeIdentity) -> str:
        """What a user is told when the run goes on with other nodes."""
        workers = "worker", len(self.members), me.workers, "the data left is dealt again"
        servers = "server", self.servers, me.nodes - me.workers, "the model is cut anew"
        differ = [pair for pair in (workers, servers) if pair[1] != pair[2]] or [workers]
        was = " and ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n, _, _ in differ)
        now = " and ".join(str(n) for _, _, n, _ in differ)
        so = ", ".join(consequence for *_, consequence in differ)
        return f"resuming step {step} of a run with {was} with {now}: {so}"
