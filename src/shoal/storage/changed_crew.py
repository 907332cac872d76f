"""ChangedCrew: how a run goes on from a checkpoint with other nodes than wrote it.

It is as if, at that step, some workers had died and others had joined. Workers that stay go on from their own
state; new ones take over the common model. The data that is left is dealt to all of them, with what those who
are gone had not handed over. A server's slices are joined, and cut for as many servers as there are now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.core.identity import NodeIdentity
from shoal.core.replica import LastDeal, Parameters
from shoal.engine.engine import Engine
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.saved_crew import SavedCrew


class ChangedCrew:
    """One step of the checkpoints in `files`, which `crew` wrote, for the nodes of a run with `me` in it."""

    def __init__(self, files: Checkpoints, step: int, crew: SavedCrew, me: NodeIdentity) -> None:
        self._files, self._step, self._crew, self._me = files, step, crew, me

    def enter(self, engine: Engine, solution: Callable[[Engine], Tensor]) -> None:
        """Have a node of the new run begin here; `solution` finds the common model at a worker."""
        if self._me.is_server:
            engine.take_over(self._of_servers(engine), self._step, own=True, clocks=self._clocks)
        else:
            self._enter_worker(engine, solution)

    # -- workers -------------------------------------------------------------------------------

    def _enter_worker(self, engine: Engine, solution: Callable[[Engine], Tensor]) -> None:
        rank, savers = self._me.rank, self._crew.savers
        own = self._goes_on(rank)
        source = self._crew.identity(rank if rank in savers else savers[0])
        state = self._files.read(self._step, source)
        names = state["kinds"]
        if not own:
            state["x"] = self._common_model(engine, state, solution)
        state["variables"] = {
            name: tensor
            for name, tensor in state["variables"].items()
            if (name not in names["mutual"] if own else name in names["shared"])
        }
        state["client"] = self._versions(state["client"] if own else {})
        engine.take_over({**state, "workers": self._crew.workers}, self._step, own=own)
        if rank == 0:
            engine.progress.credit(self._samples_of_the_gone())
        if "passes" in state["replica"] or state["crew"]["deal"] is not None:
            self._deal(engine, state["crew"]["deal"], state["progress"]["began"])

    def _common_model(
        self, engine: Engine, state: dict[str, Any], solution: Callable[[Engine], Tensor]
    ) -> Tensor:
        """What a worker begins with that has no state of its own: the servers' model, or the workers'."""
        if self._crew.servers:
            return torch.cat([server["x"] for server in self._servers])
        engine.replica.x.copy_(state["x"])
        engine.variables.load(state["variables"])
        return solution(engine).clone()

    def _deal(self, engine: Engine, deal: dict[str, Any] | None, began: int) -> None:
        """Deal the rest of the data, without what servers have ahead, with what the gone have not given."""
        crew, step, there = self._crew, self._step, self._me.first_workers
        dealt = range(crew.workers) if crew.merged is None else crew.members
        since = range(began, step)  # the last average
        held = {
            rank: (crew.holds(rank, step) or ()) if crew.servers else since
            for rank in there
            if self._goes_on(rank)
        }
        undone, done = crew.left(held, step)
        if not crew.servers:
            undone |= {rank: [*undone[rank], *since] for rank in crew.members if rank not in held}
        was = [dealt.index(rank) if rank in held else None for rank in there]
        at = {rank: place for place, rank in enumerate(dealt)}
        last = LastDeal(
            undone={at[rank]: steps for rank, steps in undone.items() if steps},
            done={at[rank]: steps for rank, steps in done.items() if steps},
            was=was if any(held.values()) else None,
            end=crew.steps or None,
        )
        engine.deal_anew(deal, last)

    def _samples_of_the_gone(self) -> int:
        """Samples in the model that none of the workers that go on has counted."""
        step, crew = self._step, self._crew
        said = {node.rank: self._files.crew_of(step, node) for node in crew.nodes}
        counts = {rank: 0.0 if one is None else one.samples for rank, one in said.items()}
        first = said[crew.savers[0]]
        if crew.servers:
            total = counts[crew.workers]
        elif first is not None and first.merged is not None:
            total = first.merged
        else:
            total = sum(counts.values())
        return round(total - sum(counts[rank] for rank in self._me.first_workers if self._goes_on(rank)))

    def _goes_on(self, rank: int) -> bool:
        """Whether a worker goes on from its own state."""
        crew, step = self._crew, self._step
        if rank not in crew.savers or crew.holds(rank, step) is None:
            return False
        if not crew.servers:
            return True
        own = self._files.crew_of(step, crew.identity(rank))  # it may be that of one before it, which died
        return own is not None and own.incarnations[str(rank)] == crew.incarnations[str(rank)]

    # -- servers -------------------------------------------------------------------------------

    @cached_property
    def _servers(self) -> list[dict[str, Any]]:
        """The states of all servers, which have the same updates in them."""
        return [self._files.read(self._step, server) for server in self._crew.server_nodes]

    @property
    def _clocks(self) -> list[int]:
        """How many batches of each worker are in the model; of those that begin here, all before it."""
        crew, there = self._crew, range(self._me.workers)
        return [crew.given[rank] if self._goes_on(rank) else self._step for rank in there]

    def _of_servers(self, engine: Engine) -> dict[str, Any]:
        """What a server goes on from."""
        states, replica = self._servers, engine.replica
        assert isinstance(replica, Parameters)
        whole = torch.cat([state["x"] for state in states])
        shared = {name for state in states for name in state["kinds"]["shared"]}
        return {
            "workers": self._crew.workers,
            "x": whole[self._me.own_slice(whole.numel())],
            "replica": states[0]["replica"] if len(states) == 1 == self._me.shards else self._cut(replica),
            "rng": states[0]["rng"],
            "variables": {name: self._joined(name, whole.numel()) for name in sorted(shared)},
            "progress": {
                **states[0]["progress"],
                "version": max(state["progress"]["version"] for state in states),
                "merged": states[0]["service"]["samples"],
            },
            "client": {},
        }

    def _cut(self, replica: Parameters) -> dict[str, Any]:
        return replica.cut([state["replica"] for state in self._servers])

    def _joined(self, name: str, numel: int) -> Tensor:
        """A variable of all servers, as far as this one has it: vectors are cut as the model is."""
        parts: Sequence[Tensor] = [
            state["variables"][name] for state in self._servers if name in state["variables"]
        ]
        if parts[0].dim() != 1:
            return parts[0]
        return torch.cat(list(parts))[self._me.own_slice(numel)].clone()

    def _versions(self, seen: dict[str, int]) -> dict[str, int]:
        """The versions that a worker has seen, by server of the new run as if the ranks were the old ones."""
        servers = range(self._me.nodes - self._me.workers)
        if not servers:
            return {}
        newest = min(seen.values()) if seen else max(s["progress"]["version"] for s in self._servers)
        return {str(self._crew.workers + k): newest for k in servers}
