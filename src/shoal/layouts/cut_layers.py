"""Model parallel fully connected layers: every process computes a part of each (Shoeybi et al. 2019).

Cut by outputs, the columns of x W, each process has a part of every sample's output. Cut by inputs, the rows,
each has a part of every sum. PyTorch's parallelize_module does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.core.task import Task
from shoal.core.vector import replicate
from shoal.layouts.group_part import GroupPart
from shoal.layouts.model_layout import ModelLayout
from shoal.programs.models.hybrid import ELEMENTWISE

Plan = dict[str, Any]


@dataclass(frozen=True)
class CutLayers(ModelLayout):
    """Fully connected layers cut over the processes; all of them compute the rest alike."""

    def check(self, model: nn.Module, task: Task) -> None:
        """Raise ValueError for a model without fully connected layers, or with tied ones."""
        super().check(model, task)
        layers = [model.get_submodule(name) for name in linear_layers(model)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no fully connected layer (nn.Linear) to cut")
        check_untied(model, layers)

    def plan(self, model: nn.Module) -> Plan:
        """How each fully connected layer is cut, by its name."""
        raise NotImplementedError

    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """Cut the layers where they are."""
        plan = self.plan(model)
        replicate(model, mesh.get_group())  # the rest, which the mesh does not cut
        parallelize_module(model, mesh, plan)

        def compute(x: Tensor, y: Tensor) -> float:
            loss = task.loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        return GroupPart(model, compute, about=f"{len(plan)} layers cut over {mesh.size()} processes")


@dataclass(frozen=True)
class CutColumns(CutLayers):
    """Every fully connected layer cut by outputs, which are gathered after each."""

    def plan(self, model: nn.Module) -> Plan:
        """Columns."""
        return {name: ColwiseParallel(output_layouts=Replicate()) for name in linear_layers(model)}


@dataclass(frozen=True)
class CutRows(CutLayers):
    """Every fully connected layer cut by inputs; outputs are summed after each."""

    def plan(self, model: nn.Module) -> Plan:
        """Rows."""
        return {name: RowwiseParallel(input_layouts=Replicate()) for name in linear_layers(model)}


@dataclass(frozen=True)
class CutInTurn(CutLayers):
    """Pairs of fully connected layers cut by columns, then rows: one sum for both. Others by columns."""

    def plan(self, model: nn.Module) -> Plan:
        """Columns and rows in turn."""
        plan: Plan = {}
        for first, second in pairs(model):
            # a DTensor knows of uneven parts
            plan |= {first: ColwiseParallel(use_local_output=False), second: RowwiseParallel()}
        alone = (name for name in linear_layers(model) if name not in plan)
        return plan | {name: ColwiseParallel(output_layouts=Replicate()) for name in alone}


def check_untied(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ValueError if another module has a parameter of these layers, which are to be cut, too."""
    cut = {id(p) for layer in layers for p in layer.parameters()}
    names: dict[int, str] = {}
    for path, module in model.named_modules():  # a module that is called twice is there once
        for own, p in module.named_parameters(path, recurse=False):
            if id(p) in names and id(p) in cut:
                raise ValueError(
                    f"{names[id(p)]} and {own} are one tensor, and one of them alone would be cut; take "
                    "layout 'pipeline'"
                )
            names.setdefault(id(p), own)


def linear_layers(model: nn.Module) -> Iterator[str]:
    """The names of the fully connected layers."""
    return (name for name, module in model.named_modules() if type(module) is nn.Linear)


def pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Fully connected layers that follow each other in an nn.Sequential, with nothing but functions between.

    Each is in one pair at most.
    """
    for name, module in model.named_modules():
        first = None
        for child, layer in module.named_children() if type(module) is nn.Sequential else ():
            path = f"{name}.{child}" if name else child
            if type(layer) is nn.Linear and first is not None:
                yield first, path
                first = None
            elif type(layer) is nn.Linear:
                first = path
            elif not isinstance(layer, ELEMENTWISE):
                first = None
