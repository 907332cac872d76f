"""Data parallelism: every worker is one process with the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shoal.core.task import Task
from shoal.layouts.group_part import GroupPart
from shoal.layouts.model_layout import ModelLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataParallel(ModelLayout):
    """The whole model in each process."""

    group: int | None = 1

    def __post_init__(self) -> None:
        if self.group != 1:
            raise ValueError(f"group={self.group}: a worker with the whole model is one process")

    def check(self, model: nn.Module, task: Task) -> None:
        """Any model will do."""

    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """There is nothing to lay out."""
        raise TypeError("the whole model lies in one process")
