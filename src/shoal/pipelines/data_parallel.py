"""The same step without a pipeline: every device has the whole model and a part of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.collectives.choice import ALGORITHMS, cheapest
from shoal.collectives.link import LinkCost
from shoal.pipelines.layer_costs import LayerCost
from shoal.pipelines.linear_layers import LinearSplit
from shoal.sim.models import Network


@dataclass(frozen=True)
class DataParallelStep:
    """A step of synchronous data parallelism, predicted. Times are seconds."""

    forward: float
    backward: float
    all_reduce: float
    algorithm: str
    memory: int
    sent: float  # bytes, by each device
    activations: float = 0.0  # seconds that activations of split layers travel

    @property
    def seconds(self) -> float:
        """With the all-reduce after the backward pass."""
        return self.forward + self.backward + self.activations + self.all_reduce

    @property
    def overlapped(self) -> float:
        """With an all-reduce that hides behind the backward pass as far as it can: the best case."""
        return self.forward + self.activations + max(self.backward, self.all_reduce)


def all_reduce_seconds(devices: int, nbytes: float, network: Network) -> float:
    """How long the cheapest all-reduce of a vector takes on this network."""
    if devices == 1:
        return 0.0
    link = LinkCost.of_network(network.latency, network.bandwidth)
    return ALGORITHMS[cheapest(devices, nbytes, link)].cost(devices, nbytes, link)


def data_parallel_step(
    layers: Sequence[LayerCost],
    devices: int,
    microbatches: int,
    network: Network,
    split: Sequence[LinearSplit] = (),
) -> DataParallelStep:
    """The step on `devices` that share the microbatches of the pipeline's step.

    Fully-connected layers in `split` are divided between the devices, as in Krizhevsky's hybrid: their
    gradients do not travel, and their activations do, in two exchanges each way. Times grow with the samples.
    Activations in memory are those of one microbatch, since a device accumulates the gradients of its own.
    """
    divided = sum(one.shape.parameter_bytes for one in split)
    nbytes = sum(layer.parameter_bytes - layer.repeated_bytes for layer in layers) - divided
    link = LinkCost.of_network(network.latency, network.bandwidth)
    word = cheapest(devices, nbytes, link)
    share = microbatches / devices
    travelling = sum(one.cheapest for one in split)
    state = sum(map(_own_state_bytes, layers))
    of_divided = divided * state / max(1, nbytes + divided)  # with its gradients and optimizer
    return DataParallelStep(
        share * sum(layer.forward for layer in layers),
        share * sum(layer.backward for layer in layers),
        all_reduce_seconds(devices, nbytes, network),
        word,
        round(state - of_divided * (1 - 1 / devices)) + sum(layer.activation_bytes for layer in layers),
        2 * (devices - 1) / devices * nbytes + travelling,
        4 * len(split) * link.latency + travelling * link.seconds_per_byte,
    )


def _own_state_bytes(layer: LayerCost) -> float:
    """Without its share of the parameters that an earlier layer has: one device holds these once."""
    return layer.state_bytes * (1 - layer.repeated_bytes / max(1, layer.parameter_bytes))
