"""NodeIdentity: which node of a run this is, and how messages to people call it and its peers."""

from __future__ import annotations

from dataclasses import dataclass, field

SERVER = -1
"""The server in `push`, `pull`, `send` and `recv`, whatever its rank; -2 is the second server, and so on."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """One node of a run. Workers have the first ranks; each server is `shards` nodes, one slice each.

    `servers` counts what the algorithm names. `incarnation` counts how often this node was restarted.
    Where workers come and go, `workers` counts places: the run may begin with fewer.
    """

    rank: int
    workers: int
    servers: int = 0
    shards: int = 1
    incarnation: int = 0
    elastic: bool = False  # whether workers come and go, so that there is a keeper
    begins_with: int | None = None  # workers at the start; None for all of them
    restarts: bool = False  # whether nodes that die are started again, and meet the others anew
    relayed: bool = False  # whether not all workers can call each other, so that one node passes messages on
    nodes: int = field(init=False, repr=False, compare=False)  # in the run, servers included
    is_server: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", self.workers + self.servers * self.shards)
        object.__setattr__(self, "is_server", self.rank >= self.workers)

    @property
    def first_workers(self) -> range:
        """The workers that the run begins with. Others may join it later, as incarnation 1 or a later one."""
        return range(self.workers if self.begins_with is None else self.begins_with)

    @property
    def processes(self) -> int:
        """Nodes in the run, and the keeper if it has one."""
        return self.nodes + self.elastic

    @property
    def others_at_first(self) -> list[int]:
        """The nodes that are there when the run starts, without worker 0."""
        return [*self.first_workers[1:], *self.server_ranks]

    @property
    def server_ranks(self) -> range:
        """The ranks of all nodes that serve."""
        return range(self.workers, self.nodes)

    @property
    def hubs(self) -> tuple[int, ...]:
        """The nodes that listen, each of which is called by those after it here, and by all that do not.

        They are the servers; without one, all nodes, so that messages go straight to whom they are for. Where
        workers cannot call each other, or one that dies ends the run, it is the keeper alone, or worker 0,
        and passes messages on.
        """
        if self.servers:
            return tuple(self.server_ranks)
        first = (self.keeper,) if self.elastic else ()
        if self.relayed or self.begins_with is not None or not (self.elastic or self.restarts):
            return first or (0,)
        return (*first, *range(self.workers))

    @property
    def role(self) -> int:
        """At a server: which of the algorithm's servers this node is a shard of, from 0."""
        return (self.rank - self.workers) // self.shards

    @property
    def shard(self) -> int:
        """At a server: which slice of the vector it owns, from 0."""
        return (self.rank - self.workers) % self.shards

    @property
    def name(self) -> str:
        """How messages to people call this node."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """How messages to people call a node; several servers are counted from 0."""
        if rank < self.workers:
            return f"worker {rank}"
        if self.elastic and rank == self.keeper:
            return "the keeper"
        return f"server {rank - self.workers}" if self.nodes - self.workers > 1 else "the server"

    def rank_of(self, dst: int) -> int:
        """The rank behind SERVER; any other rank is itself."""
        return self.workers if dst == SERVER else dst

    @property
    def keeper(self) -> int:
        """The rank of the keeper, in a run whose workers come and go: the last of all."""
        return self.nodes

    def own_slice(self, numel: int) -> slice:
        """At a server: the slice of a vector of `numel` elements that it owns."""
        return slice_of(self.shard, self.shards, numel)


def slice_of(shard: int, shards: int, numel: int) -> slice:
    """The slice of a vector that one of several equal shards owns."""
    return slice(shard * numel // shards, (shard + 1) * numel // shards)
