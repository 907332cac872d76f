"""Hybrid: convolutions data-parallel, fully connected layers model-parallel (Krizhevsky 2014).

Convolutions have few weights and most of the work, fully connected layers the opposite. So inside a group of
processes each computes the convolutions of its part of the batch; at the border the parts are gathered, and
each process computes its part of every fully connected layer for the union of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity)
"""Layers that compute every element by itself, so that a process may have any part of them."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Hybrid(nn.Module):
    """A network in two parts, over the processes of a mesh of one dimension.

    All of them call it with the same batch and get its whole output; back-propagation leaves each with the
    gradient of all `features`, summed over the processes, and of its shard of the `classifier`, whose linear
    layers become DTensors. What is computed is what one process would compute.
    """

    def __init__(self, features: nn.Module, classifier: nn.Sequential, mesh: DeviceMesh) -> None:
        super().__init__()
        if any(isinstance(layer, BATCH_NORMS) for layer in features.modules()):
            raise ValueError(
                "BatchNorm in the features would see each process's part of the batch alone; take GroupNorm"
            )
        self.features = features
        self.classifier = cut_linear_layers(classifier, mesh)
        self._mesh = mesh
        sum_gradients(features, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """The whole batch -> the classifier's output for it."""
        own = self.features(own_part(x, self._mesh))
        return cast(Tensor, self.classifier(gathered(own, self._mesh, len(x))))


def halves(model: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """The features and the classifier of a chain of layers: the linear layers at its end, and what is before.

    Raises ValueError for a model that has none of one or the other, or is no nn.Sequential.
    """
    layers = list(_flat(model))
    first = len(layers)
    while first and (type(layers[first - 1]) is nn.Linear or isinstance(layers[first - 1], ELEMENTWISE)):
        first -= 1
    while first < len(layers) and type(layers[first]) is not nn.Linear:
        first += 1  # a function before the first linear layer is one of the features
    features, classifier = nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])
    if not len(classifier) or not any(True for _ in features.parameters()):
        raise ValueError(
            f"{type(model).__name__} is no nn.Sequential of layers to compute data-parallel, as "
            "convolutions, and linear layers at its end; layouts 'tensor' and 'columns' cut linear layers "
            "wherever they are"
        )
    return features, classifier


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a chain, those of an nn.Sequential inside it too."""
    for layer in model if isinstance(model, nn.Sequential) else (model,):
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer)
        else:
            yield layer


def cut_linear_layers(layers: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Cut the linear layers over the mesh, in turn by outputs (columns) and by inputs (rows).

    Such a pair needs one sum of outputs, and one of gradients. A last layer without a partner is cut by
    outputs, which are gathered. Processes need not have equal parts.
    """
    linear = [name for name, layer in layers.named_children() if isinstance(layer, nn.Linear)]
    plan: dict[str, Any] = {}
    for number, name in enumerate(linear):
        if number % 2:
            plan[name] = RowwiseParallel()
        elif name == linear[-1]:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        else:
            plan[name] = ColwiseParallel(use_local_output=False)  # a DTensor knows of uneven parts
    return cast(nn.Sequential, parallelize_module(layers, mesh, plan))


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have back-propagation sum the gradients of the module's parameters over the processes of the mesh."""
    for p in module.parameters():
        if p.requires_grad:
            p.register_hook(partial(_summed, mesh.get_group()))  # type: ignore[no-untyped-call]


def _summed(group: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def own_part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """The samples of this process; the last ones may have fewer, or none."""
    parts, position = batch.chunk(mesh.size()), mesh.get_local_rank()
    return parts[position] if position < len(parts) else batch[:0]


def gathered(part: Tensor, mesh: DeviceMesh, samples: int) -> DTensor:
    """The parts of all processes, `samples` in all, one behind the other. Gradients flow back to each."""
    shape = torch.Size((samples, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(
        part.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return parts.redistribute(placements=[Replicate()])
