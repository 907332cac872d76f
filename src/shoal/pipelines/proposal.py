"""Proposal: how a model is cut into stages, what a step takes with each schedule, and which one to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from shoal.pipelines.chain import Chain, trace
from shoal.pipelines.data_parallel import DataParallelStep, all_reduce_seconds, data_parallel_step
from shoal.pipelines.layer_costs import LayerCost, MakeOptimizer, measure_layers
from shoal.pipelines.linear_layers import LinearSplit, linear_split
from shoal.pipelines.partition import Bounds, balanced, stage_costs
from shoal.pipelines.schedules import SCHEDULES, PipelineSchedule
from shoal.pipelines.virtual_step import PipelineTimeline, simulate_step
from shoal.report.units import bytes_text
from shoal.sim.models import Network

DATA_PARALLEL, OVERLAPPED, HYBRID = "data parallel", "data parallel, overlapped", "hybrid, overlapped"
EQUAL = 9  # digits of a second to which two times are equal


@dataclass(frozen=True)
class Candidate:
    """A way to run a step: its time, the memory of the fullest device, and why it cannot be taken."""

    name: str
    word: str  # of the command line; none for data parallelism
    seconds: float
    bubble: float | None
    memory: int
    sent: float  # bytes, by the device that sends most
    refusal: str | None = None
    timeline: PipelineTimeline | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Proposal:
    """A cut into stages, and the ways to run a step with it."""

    chain: Chain
    layers: Sequence[LayerCost]
    bounds: Bounds
    chunk_bounds: Bounds | None  # of the stages of interleaved 1F1B; None if there are too few layers
    microbatches: int
    microbatch: int  # samples in each
    network: Network
    memory: Sequence[int] | None = None  # of each device

    @property
    def stages(self) -> int:
        """The number of stages, and of devices."""
        return len(self.bounds) - 1

    @cached_property
    def data_parallel(self) -> DataParallelStep:
        """The same step without a pipeline."""
        return data_parallel_step(self.layers, self.stages, self.microbatches, self.network)

    @cached_property
    def candidates(self) -> Sequence[Candidate]:
        """Every schedule, and data parallelism on the same devices."""
        return (*self._pipelines(), *self._data_parallel())

    @cached_property
    def linears(self) -> Sequence[LinearSplit]:
        """The fully-connected layers, and what splitting each would send."""
        shapes = (shape for layer in self.layers for shape in layer.linears)
        return [linear_split(shape, self.stages, self.microbatches) for shape in shapes]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that can be taken; of equals, the one with less memory."""
        return _fastest(self.candidates)

    @property
    def best_pipeline(self) -> Candidate | None:
        """The fastest schedule of a pipeline that can be taken."""
        return _fastest([candidate for candidate in self.candidates if candidate.word])

    @property
    def tied(self) -> dict[str, list[int]]:
        """Parameters that several stages use, and the numbers of those stages."""
        return {name: stages for name, stages in self.chain.uses(self.bounds) if len(stages) > 1}

    def bounds_of(self, schedule: PipelineSchedule) -> Bounds:
        """The cuts for a schedule. Raises ValueError for an interleaved one if there are too few layers."""
        if not schedule.chunked:
            return self.bounds
        if self.chunk_bounds is None:
            raise ValueError(
                f"{schedule.name} needs two layers or more for each of the {self.stages} devices, and the "
                f"model has {len(self.layers)}; take 'gpipe' or '1f1b'"
            )
        return self.chunk_bounds

    def _pipelines(self) -> Iterator[Candidate]:
        for word, schedule in SCHEDULES.items():
            refusal = schedule.refusal(self.stages, self.microbatches)
            if schedule.chunked and (refusal or self.chunk_bounds is None):
                continue  # there is no such order
            bounds = self.bounds_of(schedule)
            costs = stage_costs(self.layers, bounds)
            timeline = simulate_step(schedule, costs, self.microbatches, self.network, self.stages)
            memories = [timeline.memory(device) for device in range(self.stages)]
            adding, added = self._tied_gradients(bounds)
            sent = [0.0] * self.stages
            for (src, _), nbytes in timeline.link_bytes.items():
                sent[src] += nbytes
            yield Candidate(
                schedule.name,
                word,
                timeline.seconds + adding,
                timeline.bubble,
                max(memories),
                max(sent) + added,
                refusal or self._too_full(memories),
                timeline,
            )

    def _tied_gradients(self, bounds: Bounds) -> tuple[float, float]:
        """Seconds and bytes of the all-reduces after a step, of weights that several devices share."""
        parameters, seconds, sent = dict(self.chain.model.named_parameters()), 0.0, 0.0
        for name, stages in self.chain.uses(bounds):
            devices, nbytes = len({stage % self.stages for stage in stages}), parameters[name].nbytes
            seconds += all_reduce_seconds(devices, nbytes, self.network)
            sent += 2 * (devices - 1) / devices * nbytes
        return seconds, sent

    def _data_parallel(self) -> Iterator[Candidate]:
        plain = self.data_parallel
        yield self._of_step(DATA_PARALLEL, plain.seconds, plain)
        yield self._of_step(OVERLAPPED, plain.overlapped, plain)
        if split := [one for one in self.linears if one.pays]:
            step = data_parallel_step(self.layers, self.stages, self.microbatches, self.network, split)
            yield self._of_step(HYBRID, step.overlapped, step)

    def _of_step(self, name: str, seconds: float, step: DataParallelStep) -> Candidate:
        refusal = self._too_full([step.memory] * self.stages)
        return Candidate(name, "", seconds, None, step.memory, step.sent, refusal)

    def _too_full(self, memories: Sequence[int]) -> str | None:
        for device, (needed, there) in enumerate(zip(memories, self.memory or memories, strict=True)):
            if needed > there:
                return f"device {device} needs {bytes_text(needed)} and has {bytes_text(there)}"
        return None


def _fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    able = [candidate for candidate in candidates if candidate.refusal is None]
    return min(able, key=lambda c: (round(c.seconds, EQUAL), c.memory), default=None)


def most_microbatches(samples: int, most: int) -> int:
    """The largest number up to `most` that divides the batch."""
    return next(number for number in range(min(most, samples), 0, -1) if samples % number == 0)


def propose(
    model: nn.Module,
    example: Tensor,
    stages: int,
    microbatches: int,
    network: Network,
    optimizer: MakeOptimizer,
    memory: Sequence[int] | None,
    chunks: int,
) -> Proposal:
    """Trace and measure a model and cut it. Raises ValueError for one that cannot be cut like this."""
    if microbatches < 1 or len(example) % microbatches:
        raise ValueError(
            f"a batch of {len(example)} samples cannot be cut into {microbatches} equal microbatches; take a "
            "number that divides it"
        )
    microbatch = example[: len(example) // microbatches].clone()  # no view of a whole data set
    chain = trace(model, microbatch)
    layers = measure_layers(chain, microbatch, optimizer)
    per_byte = 1 / network.bandwidth
    bounds = balanced(layers, stages, microbatches, per_byte, memory)
    finer = stages * chunks
    chunk_bounds = (
        balanced(layers, finer, microbatches, per_byte) if chunks > 1 and finer <= len(layers) else None
    )
    return Proposal(chain, layers, bounds, chunk_bounds, microbatches, len(microbatch), network, memory)
