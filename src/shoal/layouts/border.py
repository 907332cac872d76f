"""Hybrid: convolutions data-parallel, fully connected layers model-parallel (Krizhevsky 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shoal.core.task import Task
from shoal.core.vector import replicate
from shoal.layouts.cut_layers import check_untied
from shoal.layouts.group_part import GroupPart
from shoal.layouts.model_layout import ModelLayout
from shoal.programs.models.hybrid import Hybrid, halves

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class HybridLayout(ModelLayout):
    """Data-parallel up to the fully connected layers at the end; those cut by columns and rows in turn."""

    def check(self, model: nn.Module, task: Task) -> None:
        """Raise ValueError for a model that is no chain of features and a classifier, or a tied one."""
        super().check(model, task)
        _, classifier = halves(model)
        check_untied(model, classifier)

    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """Cut the classifier, and have the gradients of the features summed."""
        features, classifier = halves(model)
        replicate(model, mesh.get_group())
        hybrid = Hybrid(features, classifier, mesh)

        def compute(x: Tensor, y: Tensor) -> float:
            loss = task.loss(hybrid(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        layers = sum(type(layer) is nn.Linear for layer in classifier)
        return GroupPart(model, compute, about=f"{layers} layers cut over {mesh.size()} processes")
