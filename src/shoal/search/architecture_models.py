"""The modules of architectures: a chain of linear layers, and cells of motifs of primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.search.architectures import NONE, PRIMITIVES

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}


@dataclass(frozen=True)
class Shapes:
    """What a network is put between: the shape of one example, and the number of outputs."""

    example: tuple[int, ...]
    outputs: int


def build_architecture(genotype: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    """The module of an architecture, with weights from torch's global generator."""
    if genotype["kind"] == "layers":
        return LayerChain(genotype["layers"], shapes)
    return CellNetwork(genotype, shapes)


class LayerChain(nn.Module):
    """Linear layers, each with its activation; one that skips adds its input, by a linear map if it must."""

    def __init__(self, layers: Sequence[Mapping[str, Any]], shapes: Shapes) -> None:
        super().__init__()
        widths = [math.prod(shapes.example), *(layer["width"] for layer in layers)]
        self.linear = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activations = nn.ModuleList(ACTIVATIONS[layer["activation"]]() for layer in layers)
        self.skips = nn.ModuleDict(
            {
                str(k): nn.Identity() if a == b else nn.Linear(a, b, bias=False)
                for k, (a, b) in enumerate(pairwise(widths))
                if layers[k]["skip"]
            }
        )
        self.head = nn.Linear(widths[-1], shapes.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of a batch."""
        x = x.flatten(1)
        for k, (linear, activation) in enumerate(zip(self.linear, self.activations, strict=True)):
            out = activation(linear(x))
            x = out + self.skips[str(k)](x) if str(k) in self.skips else out
        out = self.head(x)
        assert isinstance(out, Tensor)
        return out


class CellNetwork(nn.Module):
    """A stem, several copies of the cell with a pooling between two, and a linear layer."""

    def __init__(self, genotype: Mapping[str, Any], shapes: Shapes) -> None:
        super().__init__()
        self.image = image_shape(shapes.example)
        channels: int = genotype["channels"]
        self.stem = nn.Conv2d(self.image[0], channels, 3, padding=1)
        self.cells = nn.ModuleList(
            MotifModule(genotype["levels"], 1, 0, channels) for _ in range(genotype["cells"])
        )
        self.head = nn.Linear(channels, shapes.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of a batch."""
        x = self.stem(x.reshape(-1, *self.image))
        for number, cell in enumerate(self.cells):
            if number and min(x.shape[-2:]) > 1:
                x = nn.functional.max_pool2d(x, 2)
            x = cell(x)
        out = self.head(torch.relu(x).mean(dim=(-2, -1)))
        assert isinstance(out, Tensor)
        return out


class MotifModule(nn.Module):
    """A motif as a module: node j merges the operations of its edges, x_j = merge of G_ij(x_i) over i < j.

    Merging is concatenation of the channels and a 1 x 1 convolution back to the width. A node without an
    edge is nothing; a motif whose last node is nothing gives zeros.
    """

    def __init__(self, levels: Sequence[Sequence[Any]], level: int, number: int, channels: int) -> None:
        super().__init__()
        self.motif = levels[level][number]
        self.edges = nn.ModuleDict()
        self.merges = nn.ModuleDict()
        live = {0}
        for j in range(1, len(self.motif)):
            sources = [i for i in range(j) if self.motif[i][j] != NONE and i in live]
            for i in sources:
                self.edges[f"{i}-{j}"] = _operation(levels, level, self.motif[i][j], channels)
            if sources:
                live.add(j)
            if len(sources) > 1:
                self.merges[str(j)] = nn.Conv2d(len(sources) * channels, channels, 1)
        self._drop_dead_ends()

    def forward(self, x: Tensor) -> Tensor:
        """The last node's value."""
        nodes: dict[int, Tensor] = {0: x}
        for j in range(1, len(self.motif)):
            into = [self.edges[f"{i}-{j}"](nodes[i]) for i in range(j) if f"{i}-{j}" in self.edges]
            if len(into) == 1:
                nodes[j] = into[0]
            elif into:
                nodes[j] = self.merges[str(j)](torch.cat(into, dim=1))
        return nodes.get(len(self.motif) - 1, x * 0)  # not zeros_like: gradients of what is before stay zeros

    def _drop_dead_ends(self) -> None:
        """Remove operations that lead nowhere: their weights would have no gradient."""
        useful = {len(self.motif) - 1}
        for i in reversed(range(len(self.motif) - 1)):
            if any(f"{i}-{j}" in self.edges for j in useful):
                useful.add(i)
        for name in [name for name in self.edges if int(name.partition("-")[2]) not in useful]:
            del self.edges[name]
        for name in [name for name in self.merges if int(name) not in useful]:
            del self.merges[name]


def _operation(levels: Sequence[Sequence[Any]], level: int, number: int, channels: int) -> nn.Module:
    if level == 0:
        return primitive(PRIMITIVES[number], channels)
    return MotifModule(levels, level - 1, number, channels)


def primitive(word: str, channels: int) -> nn.Module:
    """One of the six primitives; convolutions end in a batch norm and a ReLU."""
    if word == "identity":
        return nn.Identity()
    if word == "max3":
        return nn.MaxPool2d(3, stride=1, padding=1)
    if word == "average3":
        return nn.AvgPool2d(3, stride=1, padding=1)
    layers: list[nn.Module] = []
    if word in ("depthwise3", "separable3"):
        layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False))
    if word in ("conv1", "separable3"):
        layers.append(nn.Conv2d(channels, channels, 1, bias=False))
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())


def image_shape(example: Sequence[int]) -> tuple[int, int, int]:
    """An example as channels x height x width; a vector whose length is a square is a grey image."""
    if len(example) == 3:
        return (example[0], example[1], example[2])
    if len(example) == 2:
        return (1, example[0], example[1])
    side = math.isqrt(example[0]) if len(example) == 1 else 0
    if not side or side * side != example[0]:
        shape = " x ".join(map(str, example))
        raise ValueError(
            f"cells need images, and an example of this task is {shape}; take architecture 'layers'"
        )
    return (1, side, side)
