"""SavedCrew: who wrote a checkpoint. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.core.identity import NodeIdentity
from shoal.engine.pool import Pool, Run


@dataclass(frozen=True)
class SavedCrew:
    """The workers whose state is in a checkpoint, and how many nodes served.

    There were so many places for `workers`, the `first` of which the run began with; some may have been away,
    and others have come from elsewhere, which have no state here. While averages are `open`, which were begun
    and not completed, nobody else could take part in them. `samples` are those that this node has given to
    the model, at a server those that all have; `merged` those of all, where workers come and go. A server
    says which clock of each worker it has heard with a push, and as which incarnation each member saved, as
    that says itself. The first also says how many batches each worker has `given` to the model, how many its
    own share has (0 for one that came back), and which of the `steps` of all shares are not in it. Peers
    without a server say how far each is in its share, as far as they know. The crew is even where each worker
    has done its own share and nothing else. `rounds` of averages were complete, where workers come and go.
    `loop` is where a user's loop is in its data.
    """

    workers: int
    members: tuple[int, ...]
    servers: int
    is_open: bool
    samples: float = 0.0
    merged: float | None = None
    pushed: dict[str, int] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    rest: list[Run] = field(default_factory=list)
    steps: int = 0
    incarnations: dict[str, int] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    is_even: bool = True
    first: int | None = None
    rounds: int = 0
    loop: dict[str, Any] | None = None

    @classmethod
    def of(cls, me: NodeIdentity, state: Mapping[str, Any]) -> SavedCrew:
        """The crew of a node that saves this state."""
        crew = state.get("crew", {"members": range(me.workers), "open": 0})
        heard = state.get("service", {"pushed": {}, "savers": {}, "pool": None})
        counts = state.get("counts", {"given": 0.0, "merged": None})
        places = crew.get("places", [])
        saved = cls(
            workers=me.workers,
            members=tuple(crew["members"]),
            servers=me.nodes - me.workers,
            first=me.begins_with,
            is_open=crew["open"] > 0,
            rounds=crew.get("rounds", 0),
            loop=_place_in_data(state),
            samples=counts["given"],
            merged=counts["merged"],
            pushed=heard["pushed"],
            incarnations=heard["savers"] if me.is_server else {str(me.rank): me.incarnation},
            places=places,
            is_even=not places or places[me.rank] == state["progress"]["step"],
        )
        return saved if "lots" not in (heard["pool"] or {}) else saved._with(heard["pool"])

    def _with(self, state: dict[str, Any]) -> SavedCrew:
        """With what the first server's pool knows."""
        pool = Pool(0, 0)
        pool.load(state)
        return replace(
            self,
            given=pool.clocks,
            shares=pool.shares,
            rest=pool.rest,
            steps=state["steps"],
            is_even=pool.end is None,
        )

    @staticmethod
    def joined(told: Mapping[int, SavedCrew]) -> SavedCrew:
        """What the workers in `told` say together that have neither a server nor a keeper, each by its rank.

        One is no member that has no state here, and of which one of the others knows that it has gone.
        """
        crews = list(told.values())
        there = set.intersection(*(set(crew.members) for crew in crews)) | told.keys()
        known = [max(crew.places[rank] for crew in crews) for rank in range(crews[0].workers)]
        places = [told[rank].places[rank] if rank in told else known[rank] for rank in range(len(known))]
        steps = max(places)
        return replace(
            crews[0],
            members=tuple(sorted(there)),
            places=places,
            rest=[(rank, place, steps) for rank, place in enumerate(places)],
            steps=steps,
            is_even=len(there) == crews[0].workers and all(crew.is_even for crew in crews),
        )

    @staticmethod
    def agreed(told: Mapping[int, SavedCrew]) -> SavedCrew | None:
        """The crew whose members in `told` all say the same, each by its rank; None if there is none.

        One that has joined after an average may have saved a step that the others saved before it.
        """
        for crew in (told[rank] for rank in sorted(told)):
            if all(told[rank]._moment == crew._moment for rank in crew.members if rank in told):
                return crew
        return None

    @staticmethod
    def why_undealt(told: Sequence[SavedCrew | None]) -> str:
        """Why the rest of the data of users' loops cannot be dealt to other workers; "" if it can."""
        loops = [crew.loop for crew in told if crew is not None]
        if any(loop != loops[0] for loop in loops):
            return "the workers were at different places in their data at step"
        if any(loop is not None and not loop["is_dealt"] for loop in loops):
            return "the loop had not read its data so that shoal.shard could deal the rest to others at step"
        return ""

    @property
    def _moment(self) -> tuple[tuple[int, ...], int | None]:
        """Who took part when it was saved, and after which average, if none was under way."""
        return self.members, None if self.is_open else self.rounds

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> SavedCrew:
        """The crew that `plain` gave."""
        rest = [(owner, first, end) for owner, first, end in saved["rest"]]
        return cls(**{**saved, "members": tuple(saved["members"]), "rest": rest})

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def is_that_of(self, me: NodeIdentity) -> bool:
        """Whether the nodes of this run are the same."""
        same = self.members == tuple(me.first_workers) and self.servers == me.nodes - me.workers
        return same and self.is_even

    def holds(self, rank: int, step: int) -> range | None:
        """The batches of its share that a member at this step has done, and that no server has.

        None where the servers have more of it than its state, or it has batches of others in hand: then it
        cannot go on from its own state.
        """
        if not self.given or self.given[rank] == step:
            return range(0)
        return range(self.given[rank], step) if self.given[rank] < step <= self.shares[rank] else None

    def left(
        self, held: Mapping[int, Sequence[int]], step: int
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By share: the batches before a step that nobody has, and those from it on that are in the model."""
        missing: dict[int, set[int]] = {rank: set() for rank in range(self.workers)}
        for owner, first, end in self.rest:
            missing[owner].update(range(first, end))
        for rank, batches in held.items():
            missing[rank].difference_update(batches)
        undone = {rank: sorted(p for p in places if p < step) for rank, places in missing.items()}
        done = {
            rank: [p for p in range(step, self.steps) if p not in places] for rank, places in missing.items()
        }
        return undone, done

    @property
    def is_full(self) -> bool:
        """Whether those took part that the run begins with, and nobody else."""
        return self.members == tuple(range(self._first_workers))

    @property
    def nodes(self) -> list[NodeIdentity]:
        """Those that wrote the checkpoint."""
        return [*map(self.identity, self.savers), *self.server_nodes]

    @property
    def savers(self) -> list[int]:
        """The members that have a state here."""
        return [rank for rank in self.members if rank < self._first_workers]

    @property
    def _first_workers(self) -> int:
        """How many workers the run began with."""
        return self.workers if self.first is None else self.first

    @property
    def server_nodes(self) -> list[NodeIdentity]:
        """Those of them that served."""
        return [self.identity(self.workers + k) for k in range(self.servers)]

    def identity(self, rank: int) -> NodeIdentity:
        """The node of that rank then."""
        return NodeIdentity(rank, self.workers, 1 if self.servers else 0, max(1, self.servers))

    def describe_change(self, step: int, me: NodeIdentity) -> str:
        """What a user is told when the run goes on with other nodes."""
        workers = "worker", len(self.members), len(me.first_workers), "the data left is dealt again"
        servers = "server", self.servers, me.nodes - me.workers, "the model is cut anew"
        differ = [pair for pair in (workers, servers) if pair[1] != pair[2]]
        if not differ:
            return f"resuming step {step} of a run of which a worker had died: {workers[-1]}"
        was = " and ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n, _, _ in differ)
        now = " and ".join(str(n) for _, _, n, _ in differ)
        so = ", ".join(consequence for *_, consequence in differ)
        return f"resuming step {step} of a run with {was} with {now}: {so}"


def _place_in_data(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a user's loop is in its data; None in a run whose data Shoal deals itself."""
    passes = state.get("replica", {}).get("passes")
    if passes is None:
        return None
    return {name: passes[name] for name in ("number", "taken", "done", "again", "is_dealt")}
