"""Architectures as values of a search: plain lists and numbers that travel as JSON, and their mutations.

Layers is a chain of linear layers. Cells is the hierarchical space of Liu et al. 2017. architecture_models.py
builds the modules; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from shoal.core.catalogue import Catalogue
from shoal.core.limits import at_least
from shoal.search.ranges import Range

Genotype: TypeAlias = dict[str, Any]
"""An architecture as JSON has it; "kind" is the word of its space."""

WIDTHS = (8, 16, 32, 64, 128, 256)
ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid")

PRIMITIVES = ("conv1", "depthwise3", "separable3", "max3", "average3", "identity")
NONE = -1  # no edge; other entries are indices into the level below
IDENTITY = PRIMITIVES.index("identity")

Motif: TypeAlias = list[list[int]]
"""A strictly upper-triangular matrix: entry [i][j] is the operation from node i to node j, or NONE."""


class Architectures(Range):
    """A space of architectures. Population-based training leaves them alone: weights belong to one."""

    kind: str

    def explore(self, value: Any, rng: Random, factor: float) -> Any:
        return value

    def ends(self) -> list[Any]:
        return [self.sample(Random(0))]


@dataclass(frozen=True)
class Layers(Architectures):
    """Chains of linear layers; each has a width and an activation, and may skip (add its input)."""

    most: int = 3  # hidden layers, at most
    widest: int = 256  # units of a layer, at most

    kind = "layers"

    def __post_init__(self) -> None:
        at_least(1, most=self.most)
        at_least(WIDTHS[0], widest=self.widest)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that a layer may have."""
        return tuple(width for width in WIDTHS if width <= self.widest)

    def sample(self, rng: Random) -> Genotype:
        count = rng.randint(1, self.most)
        return {"kind": self.kind, "layers": [self._layer(rng) for _ in range(count)]}

    def mutate(self, value: Any, rng: Random) -> Genotype:
        """Add a layer, remove one, or change the width, the activation or the skip of one."""
        layers = [dict(layer) for layer in value["layers"]]
        kinds = ["width", "activation", "skip"]
        kinds += ["add"] * (len(layers) < self.most) + ["remove"] * (len(layers) > 1)
        kind, at = rng.choice(kinds), rng.randrange(len(layers))
        if kind == "add":
            layers.insert(rng.randint(0, len(layers)), self._layer(rng))
        elif kind == "remove":
            layers.pop(at)
        elif kind == "skip":
            layers[at]["skip"] = not layers[at]["skip"]
        else:
            words: Sequence[Any] = self.widths if kind == "width" else ACTIVATIONS
            layers[at][kind] = rng.choice([word for word in words if word != layers[at][kind]])
        return {"kind": self.kind, "layers": layers}

    def text(self) -> str:
        return f"layers:most={self.most},widest={self.widest}"

    def _layer(self, rng: Random) -> dict[str, Any]:
        return {
            "width": rng.choice(self.widths),
            "activation": rng.choice(ACTIVATIONS),
            "skip": rng.random() < 0.5,
        }


@dataclass(frozen=True)
class Cells(Architectures):
    """Hierarchical cells (Liu et al. 2017): six primitives, `motifs` motifs of them, one cell of those.

    A motif is a graph whose edges are operations of the level below; motifs are shared by reference. A
    random architecture is a chain of identities, mutated `mutations` times.
    """

    motifs: int = 6
    motif_nodes: int = 4
    cell_nodes: int = 5
    mutations: int = 1000
    channels: int = 16
    cells: int = 2  # copies of the cell in the network, with a pooling between two

    kind = "cells"

    def __post_init__(self) -> None:
        at_least(1, motifs=self.motifs, channels=self.channels, cells=self.cells)
        at_least(2, motif_nodes=self.motif_nodes, cell_nodes=self.cell_nodes)
        at_least(0, mutations=self.mutations)

    def sample(self, rng: Random) -> Genotype:
        levels = [
            [chain(self.motif_nodes, IDENTITY) for _ in range(self.motifs)],
            [chain(self.cell_nodes, 0)],  # of the first motif
        ]
        for _ in range(self.mutations):
            _mutate_edge(levels, rng)
        return {"kind": self.kind, "levels": levels, "channels": self.channels, "cells": self.cells}

    def mutate(self, value: Any, rng: Random) -> Genotype:
        """Set one edge of one motif of one level to a random operation of the level below, or to none."""
        levels = [[[list(row) for row in motif] for motif in level] for level in value["levels"]]
        _mutate_edge(levels, rng)
        return {**value, "levels": levels}

    def text(self) -> str:
        told = ("motifs", "motif_nodes", "cell_nodes", "mutations", "channels", "cells")
        return "cells:" + ",".join(f"{name}={getattr(self, name)}" for name in told)


def chain(nodes: int, operation: int) -> Motif:
    """The motif in which each node leads to the next by the same operation."""
    return [[operation if j == i + 1 else NONE for j in range(nodes)] for i in range(nodes)]


def _mutate_edge(levels: list[list[Motif]], rng: Random) -> None:
    level = rng.randrange(len(levels))
    motif = rng.choice(levels[level])
    i, j = sorted(rng.sample(range(len(motif)), 2))
    below = len(PRIMITIVES) if level == 0 else len(levels[level - 1])
    motif[i][j] = rng.randrange(NONE, below)


ARCHITECTURES: Catalogue[Architectures] = Catalogue(
    "architecture",
    {"layers": "shoal.search.architectures:Layers", "cells": "shoal.search.architectures:Cells"},
    checks=("shoal.core.limits",),
)
"""The spaces of architectures by name."""
