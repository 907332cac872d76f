"""Cuts a chain of layers into stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import inf

from shoal.pipelines.layer_costs import LayerCost, stage_cost
from shoal.pipelines.virtual_step import StageCost
from shoal.report.units import bytes_text

Bounds = tuple[int, ...]
"""Where stages begin, and the number of layers: (0, 3, 5) are layers 0 to 2 and 3 to 4."""


def stage_costs(layers: Sequence[LayerCost], bounds: Bounds) -> list[StageCost]:
    """The cost of each stage between the bounds."""
    return [_between(layers, first, after) for first, after in pairwise(bounds)]


def stage_seconds(layers: Sequence[LayerCost], first: int, after: int, seconds_per_byte: float) -> float:
    """The time that a stage spends on a microbatch: both passes, and sending activation and gradient."""
    sent = layers[after - 1].output_bytes if after < len(layers) else 0
    sent += layers[first].input_bytes if first > 0 else 0
    return sum(layer.seconds for layer in layers[first:after]) + sent * seconds_per_byte


def balanced(
    layers: Sequence[LayerCost],
    stages: int,
    microbatches: int,
    seconds_per_byte: float = 0.0,
    memory: Sequence[int] | None = None,
) -> Bounds:
    """The bounds with the least time in the slowest stage, by dynamic programming.

    `memory` is that of each device. A stage has to fit with the activations that 1F1B keeps there. Raises
    ValueError if there are fewer layers than stages, or if no cut fits the memory.
    """
    if stages < 1 or stages > len(layers):
        raise ValueError(
            f"{len(layers)} layers cannot form {stages} stages; take 1 to {len(layers)} stages, or a model "
            "with more layers"
        )

    @cache
    def seconds(stage: int, first: int, after: int) -> float:
        """Of these layers as that stage; infinite if they do not fit."""
        if memory is not None:
            cost = _between(layers, first, after)
            kept = min(microbatches, stages - stage) * cost.activation_bytes
            if cost.state_bytes + kept > memory[stage]:
                return inf
        return stage_seconds(layers, first, after, seconds_per_byte)

    # slowest[j]: of the best cut of the first j layers into the stages so far; cuts[stage][j]: its last one
    slowest = [0.0] + [inf] * len(layers)
    cuts: list[dict[int, int]] = []
    for stage in range(stages):
        reached, chosen = [inf] * (len(layers) + 1), {}
        for after in range(stage + 1, len(layers) - (stages - stage - 1) + 1):
            tries = {i: max(slowest[i], seconds(stage, i, after)) for i in range(stage, after)}
            chosen[after] = min(tries, key=tries.__getitem__)
            reached[after] = tries[chosen[after]]
        slowest = reached
        cuts.append(chosen)
    if slowest[-1] == inf:
        raise ValueError(_too_large(layers, stages, memory or ()))
    bounds = [len(layers)]
    for chosen in reversed(cuts):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


def _between(layers: Sequence[LayerCost], first: int, after: int) -> StageCost:
    return stage_cost(layers[first:after], first == 0, after == len(layers))


def _too_large(layers: Sequence[LayerCost], stages: int, memory: Sequence[int]) -> str:
    largest = max(layers, key=lambda layer: layer.state_bytes)
    total = sum(layer.state_bytes for layer in layers)
    room = bytes_text(min(memory))
    return (
        f"no cut into {stages} stages fits devices with {room}: parameters, gradients and optimizer take "
        f"{bytes_text(total)}, of which layer {largest.name!r} takes {bytes_text(largest.state_bytes)}, and "
        "activations come on top. Take more stages, larger devices, smaller microbatches, or split that layer"
    )
