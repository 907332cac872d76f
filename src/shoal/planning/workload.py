"""Workload: what is known of a task before it runs: its step, its model, and what codecs make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.sim import Compute, Network
from shoal.sim.hardware import Machine


@dataclass(frozen=True)
class CodecCost:
    """What a codec makes of the model's vector."""

    ratio: float = 1.0  # bytes that travel, of those of the vector
    merged: float = 1.0  # the same for an average
    encode: float = 0.0  # seconds for each byte of the vector, on the machine where it runs
    decode: float = 0.0
    kept: float = 0.0  # vectors of error feedback
    share: float | None = None  # of the elements, for a sparse codec
    reductions: int = 0  # rounds in which the codec forms an average itself; 0: workers decode and add
    is_exact: bool = False


UNCOMPRESSED = CodecCost(is_exact=True)


@dataclass(frozen=True)
class Workload:
    """A task as the formulas see it, wherever it runs."""

    task: str
    samples: int  # of the training data
    batch: int  # samples of a worker's step
    parameters: int
    itemsize: int = 4
    optimizer: float = 0.0  # vectors that the optimizer keeps
    codecs: Mapping[str, CodecCost] = field(default_factory=lambda: {"none": UNCOMPRESSED})
    connected: float = 0.0  # share of the parameters in fully connected layers
    refused: Mapping[str, str] = field(default_factory=dict)  # strategies that its optimizer has not, and why

    @property
    def nbytes(self) -> int:
        """Bytes of the model's vector."""
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class Site:
    """Where it runs: how the nodes are connected, what they run on, and what a step takes there."""

    network: Network
    machine: Machine
    compute: Compute


Surroundings = Callable[[int, str, bool], Site]
"""(nodes, codec, whether some are servers) -> the site as so many nodes meet it."""
