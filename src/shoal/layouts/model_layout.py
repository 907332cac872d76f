"""ModelLayout: how a model lies in the processes of one worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import Tensor, nn

from shoal.core.limits import at_least
from shoal.core.task import Task
from shoal.core.vector import is_statistic, named_buffers
from shoal.layouts.group_part import GroupPart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Own = TypeVar("Own", bound="ModelLayout")


@dataclass(frozen=True)
class ModelLayout(ABC):
    """One way to share a model among the processes of a worker. Frozen: what it is laid out over is given."""

    cuts_matrices: ClassVar[bool] = True  # whether a process holds parts of single parameters
    draws_alike: ClassVar[bool] = True  # whether all processes must draw the same random numbers

    group: int | None = None  # processes of a worker; in a comparison all of them by default

    def __post_init__(self) -> None:
        at_least(1, group=self.group)

    def over(self: Own, processes: int) -> Own:
        """The layout of a comparison on so many processes. Raises ValueError if they are not whole groups."""
        group = processes if self.group is None else self.group
        if processes % group:
            raise ValueError(f"{processes} processes cannot be shared out to workers of {group} processes")
        return replace(self, group=group)

    def check(self, model: nn.Module, task: Task) -> None:
        """Raise ValueError for a model that cannot be laid out like this; extend it for what it needs."""
        if any(is_statistic(name, buffer) for name, buffer in named_buffers(model)):
            raise ValueError(
                "BatchNorm would see a part of the worker's batch alone in each process; take GroupNorm"
            )
        if self.draws_alike and any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
            raise ValueError(
                "dropout would draw other numbers in each process, and they must compute alike; take a model "
                "without it, or layout 'pipeline'"
            )

    @abstractmethod
    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """This process's part. All processes of the group call it with the same model and batch.

        Parameters of `model` become DTensors where they are cut, and empty where other processes hold them;
        they keep their names.
        """
