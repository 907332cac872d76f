"""Branches: a network with several inputs and one shared encoder, one process for each input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shoal.core.task import Task
from shoal.layouts.group_part import GroupPart
from shoal.layouts.model_layout import ModelLayout
from shoal.programs.models.branches import StackedBranches
from shoal.programs.models.mesh_branches import MeshBranches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class BranchesLayout(ModelLayout):
    """A process for each input of the network, which encodes it; all compute the head alike."""

    cuts_matrices = False

    group: int | None = 2

    def check(self, model: nn.Module, task: Task) -> None:
        """Raise ValueError for a model without branches, or with another number of them."""
        super().check(model, task)
        if not isinstance(model, StackedBranches):
            raise ValueError(
                f"{type(model).__name__} has no branches; take a task such as 'digit-pairs', whose model is "
                "shoal.programs.models.branches.StackedBranches"
            )
        if self.group != model.branches:
            raise ValueError(f"group={self.group}: the model has {model.branches} branches, one a process")

    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """Have the gradients of the encoder summed."""
        assert isinstance(model, StackedBranches)
        meshed = MeshBranches(model.encoder, model.head, mesh)

        def compute(x: Tensor, y: Tensor) -> float:
            loss = task.loss(meshed(*x.unbind(1)), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        return GroupPart(model, compute, about=f"{mesh.size()} branches")
