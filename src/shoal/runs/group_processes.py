"""Workers that are groups of processes: what each process does beyond a worker of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from shoal.core.task import Data
from shoal.core.vector import trainable
from shoal.launch.worker_group import mesh_of_worker
from shoal.layouts.assembly import assembled
from shoal.layouts.group_part import GroupPart, HeldPiece, pieces_of
from shoal.layouts.inner_traffic import bytes_of
from shoal.replicas.module import ModuleReplica
from shoal.runs.curve import Snapshot
from shoal.runs.plan import Plan
from shoal.runs.result import joined
from shoal.storage.model_file import load_model


class GroupMember:
    """One process of a worker that is a group: its part of the model, and its traffic inside the group."""

    def __init__(
        self, plan: Plan, data: Data, model: nn.Module, place: tuple[int, int], folder: Path
    ) -> None:
        rank, position = place
        self._open, self._plan, self._data = ExitStack(), plan, data
        mesh = self._open.enter_context(mesh_of_worker(folder, rank, position, plan.group, plan.timeout))
        self.whole_bytes = sum(p.nbytes for p in trainable(model)[0])
        example = data.x[: plan.task.batch]
        self.part: GroupPart = plan.layout.lay_out(model, plan.task, example, mesh)
        self._step_bytes = 0

    def rehearse(self, replica: ModuleReplica) -> None:
        """Go through a step twice: the first connects the processes, the second is counted."""
        batch = self._data.x[: self._plan.task.batch], self._data.y[: self._plan.task.batch]
        replica.rehearse(*batch)
        self._step_bytes = bytes_of(lambda: replica.rehearse(*batch))

    def figures(self, replica: ModuleReplica, steps: int) -> dict[str, Any]:
        """What it adds to its node's report."""
        return {
            "bytes_inside": self._step_bytes * steps,
            "pieces": [asdict(piece) for piece in pieces_of(replica.flat)],
            "lies": self.part.about,
        }

    def leave(self) -> None:
        """Leave the group, at the end of a run that went well."""
        self._open.close()


def join_processes(plan: Plan, reports: Sequence[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """One report for each worker: traffic is that of all its processes, memory that of the fullest."""
    inside: dict[int, int] = {}
    memory: dict[int, list[int]] = {}
    for said in reports:
        inside[said["rank"]] = inside.get(said["rank"], 0) + said.pop("bytes_inside")
        memory.setdefault(said["rank"], []).extend([said["memory"]] if said["memory"] is not None else [])
        said.pop("pieces")
    parameters = trainable(model)[1].numel
    return [
        {
            **said,
            "parameters": parameters,
            "memory": max(memory[said["rank"]], default=None),
            "bytes_inside": inside[said["rank"]],
            "bytes_sent": said["bytes_sent"] + inside[said["rank"]],
        }
        for said in joined(reports)
    ]


def whole_snapshots(
    plan: Plan, rank: int, reports: Sequence[dict[str, Any]], folder: Path, model: nn.Module
) -> Iterator[Snapshot]:
    """The snapshots of a worker's whole model, put together from those of its processes."""
    members = reports[rank * plan.group : (rank + 1) * plan.group]
    pieces = [[HeldPiece(p["name"], tuple(p["shape"]), p["dimension"]) for p in m["pieces"]] for m in members]
    left = [
        load_model(position_folder(folder, g) / f"solution-{rank}.safetensors") for g in range(plan.group)
    ]
    layout = trainable(model)[1]
    for number, times in enumerate(zip(*(m.pop("snapshots") for m in members), strict=True)):
        parts = [(pieces[g], left[g][str(number)]) for g in range(plan.group)]
        yield Snapshot(max(seconds for seconds, _ in times), times[0][1], assembled(layout, parts))


def position_folder(folder: Path, position: int) -> Path:
    """Where the processes of that position in all groups meet, and leave their models."""
    return folder / f"position-{position}"
