"""Which fully-connected layers are worth splitting between devices (Krizhevsky 2014).

Data parallelism sends a layer's gradients, however small the batch. A layer that is split by columns or by
rows sends activations instead, however many parameters it has. Convolutions have few parameters and large
activations: they stay data-parallel. Together that is his hybrid.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.pipelines.layer_costs import LinearShape

COLUMNS, ROWS = "columns", "rows"


@dataclass(frozen=True)
class LinearSplit:
    """The bytes that one device sends in a step for a fully-connected layer."""

    shape: LinearShape
    samples: int  # of all devices in a step; positions of sequences count as samples
    data_parallel: float  # all-reduce of the gradients
    columns: float  # each device computes some outputs
    rows: float  # each device has some inputs, and outputs are summed

    @property
    def best(self) -> str:
        """The cheaper of the two ways."""
        return COLUMNS if self.columns <= self.rows else ROWS

    @property
    def cheapest(self) -> float:
        """What it sends."""
        return min(self.columns, self.rows)

    @property
    def pays(self) -> bool:
        """Whether that is less than with data parallelism. Weights that are used twice are not split."""
        return self.cheapest < self.data_parallel and not self.shape.shared


def linear_split(shape: LinearShape, devices: int, microbatches: int) -> LinearSplit:
    """The traffic of a layer between two that are data-parallel on the same devices.

    Columns: the inputs of all samples go to all devices (all-gather), and every device sends others their
    samples' outputs. Rows: every device sends others their part of its samples' inputs, and outputs are
    summed at the device of the sample (reduce-scatter). The gradients go the same way back.
    """
    samples = shape.samples * microbatches
    others = (devices - 1) / devices
    there_and_back = 2 * others * samples * shape.element_bytes
    return LinearSplit(
        shape,
        samples,
        2 * others * shape.parameter_bytes,
        there_and_back * (shape.inputs + shape.outputs / devices),
        there_and_back * (shape.inputs / devices + shape.outputs),
    )
