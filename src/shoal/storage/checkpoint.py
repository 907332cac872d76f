"""Checkpoints: every node's whole state, and the weights under the model's own names, written atomically.

    DIR/step-00000100/worker-0.safetensors   tensors of the state
                      worker-0.json          everything else, with the SHA-256 of itself and of these files
                      model.safetensors      the model, for anyone who reads safetensors
    DIR/model.safetensors                    the trained model, when training is over
    DIR/attempt                              by what the steps of this start are told from those of another

The processes of a worker that is a group are worker-0-0, worker-0-1 and so on; no file has the whole model.

A JSON file is written after the files it vouches for, so a node's state is there whole or not at all. It
says who took part then; a step counts when the state of all of these is there and undamaged. Every node
checks its own files, so that resuming with the same nodes reads the tensors of each at one node only. Nothing
is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from shoal.core.errors import CheckpointError
from shoal.core.identity import NodeIdentity
from shoal.core.state_tree import harvest, plant
from shoal.engine.engine import Engine
from shoal.storage.attempt_mark import AttemptMark
from shoal.storage.model_file import model_bytes
from shoal.storage.saved_crew import SavedCrew
from shoal.storage.step_folders import (
    KEPT,
    aside_folder,
    records_in,
    remove_before,
    set_aside,
    step_folder,
    steps_in,
)
from shoal.storage.whole_files import cannot_write, digest, read_file, seal, sync_folder, unseal, write_whole

FORMAT = 10

NO_STEP = -1
"""Stands for a step where there is no checkpoint; lower than any."""


NUMBERS = ("workers", "servers")
"""What may differ in a run that is resumed with other nodes."""

OWN_LOOP = "with this strategy your own training loop goes on with the workers and servers that it had"
"""Why numbers must stay, where nothing else is said."""

LEG = "leg-"
"""Folders with the checkpoints of a run whose crew grows begin with this: one for each leg, from leg-1 on."""


class Checkpoints:
    """The checkpoints of one run in one folder. `config` is what must be the same for a run to be resumed.

    `bound` says why that holds for the numbers of workers and servers, too; None where they may change.
    `processes` counts those of all nodes; `position` is the place of this one in a node that has several.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        processes: int,
        keep: int = KEPT,
        position: int | None = None,
        bound: str | None = OWN_LOOP,
    ) -> None:
        self.folder = Path(folder)
        self._bound = bound
        self._position = position
        self._config = json.loads(json.dumps(config))  # as it will be read back
        self._processes = processes
        self._keep = keep
        self.attempt = AttemptMark(self.folder)

    def save(self, engine: Engine, model: Mapping[str, Tensor] | None = None) -> None:
        """Write a node's state before its next step, and the model where this node holds it."""
        self.write(engine.progress.t, engine.identity, engine.state(), model)
        first = engine.identity.workers if engine.identity.servers else engine.members[0]
        if engine.rank == first or self._seems_complete(engine):
            self._prune()

    def _seems_complete(self, engine: Engine) -> bool:
        """Whether as many have saved this step as take part, so that this node was the last of them."""
        me = engine.identity
        nodes = len({*engine.members} & {*me.first_workers}) + len(me.server_ranks)
        there = records_in(self.folder, engine.progress.t)
        return len(there) >= (nodes if self._position is None else self._processes)

    def write(
        self, t: int, me: NodeIdentity, state: Mapping[str, Any], model: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the state of a node before step `t`, and the model where this node holds it."""
        role, step = self._role(me), step_folder(self.folder, t)
        try:
            step.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(self.folder)
        except OSError as error:
            raise cannot_write(step, error) from error
        tensors: dict[str, Tensor] = {}
        tree = plant(dict(state), tensors, "state")
        files = {f"{role}.safetensors": save_tensors(tensors)}
        if model is not None:
            files["model.safetensors"] = model_bytes(model)
        for name, content in files.items():
            write_whole(step / name, content)
        sums = {name: digest(content) for name, content in files.items()}
        record = {
            "format": FORMAT,
            "step": t,
            "attempt": str(self.attempt),
            "config": self._config,
            "crew": SavedCrew.of(me, state).plain(),
            "files": sums,
            "state": tree,
        }
        write_whole(step / f"{role}.json", seal(record))

    @property
    def is_bound(self) -> bool:
        """Whether only the nodes that wrote a step can go on from it."""
        return self._bound is not None

    def check(self) -> None:
        """Raise CheckpointError if the folder holds the checkpoint of a run with other settings.

        Reads what the first worker saved, without the tensors.
        """
        if "crew" not in self._config and any(self.folder.glob(f"{LEG}*")):
            raise CheckpointError(
                f"the checkpoint in {self.folder} belongs to a run whose crew grows. "
                "Use the same settings, or another folder."
            )
        for step in steps_in(self.folder):
            workers = self._workers_at(step)
            if workers:
                self._record(step, self._name("worker", workers[0]))
            elif records_in(self.folder, step, "worker-*"):
                raise CheckpointError(
                    f"the checkpoint in {self.folder} belongs to a run with another --group. "
                    "Use the same one, or another folder."
                )

    def has(self, step: int, me: NodeIdentity) -> bool:
        """Whether this node, or one that died in its place, has saved before this step."""
        return (step_folder(self.folder, step) / f"{self._role(me)}.json").exists()

    def newest(self, me: NodeIdentity, limit: int | None = None) -> int:
        """The newest step, up to `limit`, that this node can go on from; NO_STEP if there is none.

        Reads this node's tensors only, unless other nodes wrote them: then worker 0 sees to it that the state
        of all of these is whole. Raises CheckpointError if they are of a run with other settings.
        """
        refused = None
        for step in sorted(steps_in(self.folder), reverse=True):
            if limit is None or step <= limit:
                record = self._record(step, self._role(me))
                crew = self._crew_with(step, record)
                if crew is None:
                    continue
                if crew.is_that_of(me):
                    if self._vouches(step, self._role(me), record):
                        return step
                elif self._bound is None and self._is_whole_for(step, crew, me):
                    if (why := self._unfinished(step, crew)) is None:
                        return step
                    refused = refused or why
        if refused is not None and limit is None:
            raise CheckpointError(refused)
        return NO_STEP

    def _is_whole_for(self, step: int, crew: SavedCrew, me: NodeIdentity) -> bool:
        """Whether what a node needs of a step of other nodes is whole; at worker 0, all of it."""
        if me.rank == 0:
            needed = crew.nodes
        else:
            own = [crew.identity(me.rank if me.rank in crew.savers else crew.savers[0])]
            needed = [*([] if me.is_server else own), *crew.server_nodes]
        roles = map(self._role, needed)
        return all(self._vouches(step, role, self._record(step, role)) for role in roles)

    def _unfinished(self, step: int, crew: SavedCrew) -> str | None:
        """Why other nodes cannot go on from a step that is whole; None if they can."""
        heard = [self.crew_of(step, server) for server in crew.server_nodes]
        if crew.is_open:
            what = "an average was under way at step"
        elif any(one is None or one.pushed != other.pushed for one in heard for other in heard if other):
            what = "the servers had not all got the same updates at step"
        elif (what := self._why_undealt(step, crew)) == "":
            return None
        return (
            f"the checkpoint in {self.folder} can only be resumed with the workers and servers that the run "
            f"began with, if all of them took part then: {what} {step}"
        )

    def _why_undealt(self, step: int, crew: SavedCrew) -> str:
        return SavedCrew.why_undealt([self.crew_of(step, crew.identity(rank)) for rank in crew.savers])

    def crew_at(self, step: int, me: NodeIdentity) -> SavedCrew | None:
        """Who took part in a step, as far as the files here tell; None if they do not.

        The first server knows, which saves last; or else this node, or the first worker. Where workers come
        and go, and among peers that go on without one that has gone, they know it together.
        """
        return self._crew_with(step, self._record(step, self._role(me)))

    def _crew_with(self, step: int, record: dict[str, Any] | None) -> SavedCrew | None:
        """The same, with the record of a node, if there is one."""
        workers = self._workers_at(step)
        if record is None and not workers:
            return None
        own = None if record is None else self._read_crew(record)
        crew = own or self._crew_in(step, self._name("worker", workers[0]))
        if crew is not None and crew.servers:
            return self.crew_of(step, crew.server_nodes[0]) or crew
        if crew is None or not (crew.places or crew.merged is not None):
            return crew
        told = {rank: self._crew_in(step, self._name("worker", rank)) for rank in workers}
        known = {rank: one for rank, one in told.items() if one is not None}
        if not known:
            return None  # another node may remove the step at this moment
        return SavedCrew.joined(known) if crew.places else SavedCrew.agreed(known)

    def crew_of(self, step: int, node: NodeIdentity) -> SavedCrew | None:
        """What that node says about who took part in a step; None if it has saved nothing."""
        return self._crew_in(step, self._role(node))

    def _crew_in(self, step: int, role: str) -> SavedCrew | None:
        record = self._record(step, role)
        return None if record is None else self._read_crew(record)

    def _read_crew(self, record: dict[str, Any]) -> SavedCrew:
        """The crew in a record. Of a user's loop, each worker's own state says where it is in the data."""
        crew = SavedCrew.read(record["crew"])
        return replace(crew, is_even=True) if self.is_bound and crew.places else crew

    def _workers_at(self, step: int) -> list[int]:
        """The workers of which there is a record at this step."""
        end = "" if self._position is None else f"-{self._position}"
        names = (path.stem for path in records_in(self.folder, step, "worker-*"))
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(rf"worker-(\d+){end}", name)))

    def _name(self, kind: str, number: int) -> str:
        return f"{kind}-{number}" if self._position is None else f"{kind}-{number}-{self._position}"

    def set_aside_after(self, step: int, me: NodeIdentity) -> list[Path]:
        """Move what this node saved after that step, from which all go on, aside; returns the folders.

        Else it might be taken for what others save there now. Worker 0 moves that of nodes that are no more,
        too. Every attempt has a folder of its own, by the mark in its records.
        """
        aside: set[Path] = set()
        for later in (one for one in steps_in(self.folder) if one > step):
            for role in self._stale_roles(later, me):
                record = self._record(later, role)
                whose = aside_folder(self.folder, step, "" if record is None else record.get("attempt", ""))
                set_aside(self.folder, later, whose, self._names(later, role))
                aside.add(whose)
        return sorted(aside)

    def _stale_roles(self, step: int, me: NodeIdentity) -> list[str]:
        """Whose records at a step of an earlier attempt this node sees to."""
        there = [path.stem for path in records_in(self.folder, step)]
        run = {self._role(replace(me, rank=rank)) for rank in range(me.nodes)}
        clears_up = me.rank == 0 and self._position is None
        return [role for role in there if role == self._role(me) or (clears_up and role not in run)]

    def _names(self, step: int, role: str) -> list[str]:
        """The files of a node at a step, the record last."""
        record = self._record(step, role)
        named = [] if record is None else [name for name in record["files"] if Path(name).name == name]
        return [*dict.fromkeys([f"{role}.safetensors", *named]), f"{role}.json"]

    def latest(self, nodes: Iterable[NodeIdentity]) -> int:
        """The newest step whose state is whole at all these nodes; NO_STEP if there is none."""
        nodes, limit = list(nodes), None
        while len(steps := {self.newest(me, limit) for me in nodes}) > 1:
            limit = min(steps)
        return steps.pop()

    def load(self, step: int, engine: Engine) -> None:
        """Put the node into the state it was saved in, at a step at which `newest` found it whole."""
        engine.load(self.read(step, engine.identity))

    def read(self, step: int, me: NodeIdentity) -> dict[str, Any]:
        """The state in which a node was saved, at a step at which `newest` found it whole."""
        state = self.find(step, me)
        if state is None:
            raise CheckpointError(
                f"the state of {me.name} at step {step} in {self.folder} is missing or damaged"
            )
        return state

    def find(self, step: int, me: NodeIdentity) -> dict[str, Any] | None:
        """What a node saved before this step; None if that is missing or damaged."""
        role = self._role(me)
        record = self._record(step, role)
        content = None if record is None else self._content(step, f"{role}.safetensors", record["files"])
        if record is None or content is None:
            return None
        state: dict[str, Any] = harvest(record["state"], load_tensors(content))
        return state

    def _role(self, me: NodeIdentity) -> str:
        return self._name(*(("server", me.rank - me.workers) if me.is_server else ("worker", me.rank)))

    def _check_config(self, saved: dict[str, Any]) -> None:
        names = sorted(saved.keys() | self._config.keys())
        differ = [name for name in names if saved.get(name) != self._config.get(name)]
        others = [name for name in differ if name not in NUMBERS]
        if not others and self._bound is None:
            return
        if differ:
            was = ", ".join(f"{k}={saved.get(k)!r} (now {self._config.get(k)!r})" for k in others or differ)
            why = "" if others else f", and {self._bound}"
            raise CheckpointError(
                f"the checkpoint in {self.folder} belongs to another run: {was}{why}. "
                "Use the same settings, or another folder."
            )

    def _record(self, step: int, role: str) -> dict[str, Any] | None:
        """What a node saved besides tensors, or None if that is missing or damaged."""
        path = step_folder(self.folder, step) / f"{role}.json"
        try:
            content = read_file(path)
        except OSError:
            return None
        record = unseal(content)
        wrote = _earlier_format(content) if record is None else record["format"]
        if wrote is not None and wrote != FORMAT:
            raise CheckpointError(
                f"{path} has format {wrote}, and this version of Shoal reads format {FORMAT}; "
                "use another folder, or the version that wrote it"
            )
        if record is not None:
            self._check_config(record["config"])
        return record

    def _content(self, step: int, name: str, sums: Mapping[str, str]) -> bytes | None:
        """A file that belongs to a record with these checksums; None if it is missing or damaged."""
        if name not in sums or Path(name).name != name:
            return None
        try:
            content = read_file(step_folder(self.folder, step) / name)
        except OSError:
            return None
        return content if digest(content) == sums[name] else None

    def _vouches(self, step: int, role: str, record: dict[str, Any] | None) -> bool:
        """Whether there is a record of a node, and all files that it names are there and undamaged."""
        if record is None:
            return False
        sums = record["files"]
        return all(self._content(step, name, sums) is not None for name in {f"{role}.safetensors", *sums})

    def _is_complete(self, step: int) -> bool:
        """Whether every process has written its state; whether it is undamaged is seen when it is loaded."""
        workers = self._workers_at(step)
        crew = self.crew_at(step, NodeIdentity(workers[0], 1 + workers[0])) if workers else None
        if crew is None:
            return False
        there = {path.stem for path in records_in(self.folder, step)}
        if self._position is not None:  # a group, of which nobody is away
            return len(there) == self._processes
        all_took_part = crew.is_even and crew.is_full
        if not all_took_part and (self.is_bound or crew.is_open or self._why_undealt(step, crew)):
            return False  # nobody could go on from it
        return bool(crew.savers) and all(self._role(node) in there for node in crew.nodes)

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` whole steps."""
        steps = sorted(steps_in(self.folder), reverse=True)
        if len(steps) < self._keep:
            return  # without a look into them
        whole = list(islice(filter(self._is_complete, steps), self._keep))
        if len(whole) == self._keep:
            remove_before(self.folder, whole[self._keep - 1])


def _earlier_format(content: bytes) -> int | None:
    """The format of a record that was written before records had a checksum; None if it is none."""
    try:
        wrote = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        return None
    return wrote if isinstance(wrote, int) else None
