"""Pipeline: every process holds a stage of the model, and microbatches pass through (Huang et al. 2019).

PyTorch's torch.distributed.pipelining runs the stages; `shoal split` proposes where to cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.core.limits import at_least, one_of
from shoal.core.task import Task
from shoal.layouts.group_part import GroupPart
from shoal.layouts.model_layout import ModelLayout
from shoal.layouts.split_words import AUTO, EVEN, check_split, layers_of_stages
from shoal.pipelines.chain import Chain, trace
from shoal.pipelines.pipeline import Pipeline, proposed_pipeline
from shoal.pipelines.proposal import Proposal, most_microbatches, propose
from shoal.pipelines.schedules import SCHEDULES, PipelineSchedule
from shoal.sim.models import Network

ONE_HOST = "10Gbit,200us"  # gloo between processes of a host, as the split assumes it
CHUNKS = 2  # stages of interleaved 1F1B in each process


@dataclass(frozen=True)
class PipelineLayout(ModelLayout):
    """A stage of the model in each process; with schedule=interleaved two. `split` says where it is cut."""

    cuts_matrices = False
    draws_alike = False

    schedule: str = "auto"
    microbatches: int | None = None  # 4 times the stages, or the most that the batch allows
    split: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("auto", "gpipe", "1f1b", "interleaved"), schedule=self.schedule)
        at_least(1, microbatches=self.microbatches)
        check_split(self.split)

    def check(self, model: nn.Module, task: Task) -> None:
        """Raise ValueError for a model that is no chain, or numbers that do not fit."""
        super().check(model, task)
        group, sizes = self.group or 1, layers_of_stages(self.split)
        stages = group * (CHUNKS if self.schedule == "interleaved" else 1)
        if sizes is not None and len(sizes) != stages:
            raise ValueError(f"split={self.split} has {len(sizes)} stages, and there must be {stages}")
        if self.microbatches is not None and task.batch % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} do not divide a worker's batch of {task.batch} samples"
            )
        if self.schedule != AUTO:
            number = self._microbatches(task.batch)
            if refusal := SCHEDULES[self.schedule].refusal(group, number):
                raise ValueError(f"{number} microbatches: {refusal}")

    def lay_out(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> GroupPart:
        """Cut the model, and keep the stages of this process; the other parameters become empty."""
        pipeline = self._pipeline(model, task, example, mesh)
        held = {id(p) for p in pipeline.parameters()}
        _check_every_stage_trains(pipeline, mesh)
        for p in model.parameters():
            if id(p) not in held:
                p.data = p.data.new_empty(0)
        last, group = mesh.size() - 1, mesh.get_group()

        def compute(x: Tensor, y: Tensor) -> float:
            told = torch.tensor([pipeline.step(x, y) or 0.0], dtype=torch.float64)
            dist.broadcast(told, group=group, group_src=last)
            return float(told)

        return GroupPart(model, compute, held, _about(pipeline), stream=mesh.get_local_rank())

    def _microbatches(self, samples: int) -> int:
        most = 4 * (self.group or 1)
        return most_microbatches(samples, most) if self.microbatches is None else self.microbatches

    def _pipeline(self, model: nn.Module, task: Task, example: Tensor, mesh: DeviceMesh) -> Pipeline:
        group, number = mesh.get_group(), self._microbatches(len(example))
        named = None if self.schedule == AUTO else SCHEDULES[self.schedule]
        if named is not None and self.split != AUTO:  # nothing to measure
            chain = trace(model, example[: len(example) // number].clone())
            return Pipeline(
                chain, self._bounds(chain, named, mesh.size()), named, number, task.loss, group=group
            )
        optimizer = partial(task.optimizer, lr=task.lr)
        network = Network.parse(ONE_HOST)
        proposal = propose(model, example, mesh.size(), number, network, optimizer, None, CHUNKS)
        if self.split != AUTO:
            proposal = self._recut(proposal)
        return proposed_pipeline(proposal, task.loss, None if named is None else self.schedule, group=group)

    def _recut(self, proposal: Proposal) -> Proposal:
        """The same measurements with the cuts that `split` says. Stages that are named do not interleave."""
        bounds = self._bounds(proposal.chain, SCHEDULES["gpipe"], proposal.stages)
        chunked = proposal.stages * CHUNKS
        fine = even_bounds(len(proposal.chain), chunked) if self.split == EVEN else None
        return replace(proposal, bounds=bounds, chunk_bounds=fine)

    def _bounds(self, chain: Chain, schedule: PipelineSchedule, processes: int) -> tuple[int, ...]:
        """Where the stages begin and the last one ends."""
        sizes, stages = layers_of_stages(self.split), processes * (CHUNKS if schedule.chunked else 1)
        if sizes is None:
            bounds = even_bounds(len(chain), stages)
            if bounds is None:
                raise ValueError(f"the model has {len(chain)} layers, too few for {stages} stages")
            return bounds
        if sum(sizes) != len(chain):
            raise ValueError(
                f"split={self.split} has {sum(sizes)} layers, and the model has {len(chain)}: "
                f"{', '.join(chain.names)}"
            )
        return (0, *accumulate(sizes))


def even_bounds(layers: int, stages: int) -> tuple[int, ...] | None:
    """Stages of as many layers each, or one more; None if there are too few."""
    return tuple(layers * k // stages for k in range(stages + 1)) if layers >= stages else None


def _check_every_stage_trains(pipeline: Pipeline, mesh: DeviceMesh) -> None:
    """Raise ValueError, in all processes, if one of them has nothing to train."""
    held = torch.tensor([float(sum(p.numel() for p in pipeline.parameters()))])
    each = [torch.zeros_like(held) for _ in range(mesh.size())]
    dist.all_gather(each, held, group=mesh.get_group())
    empty = [process for process, number in enumerate(each) if not float(number)]
    if empty:
        raise ValueError(
            f"process {empty[0]} would get layers without parameters; take fewer processes, or name the "
            "layers of every stage, as in split=5-4-4-5"
        )


def _about(pipeline: Pipeline) -> str:
    sizes = [after - first for first, after in zip(pipeline.bounds, pipeline.bounds[1:], strict=False)]
    return f"{pipeline.name}, {pipeline.microbatches} microbatches, stages of {_listed(sizes)} layers"


def _listed(sizes: Sequence[int]) -> str:
    return "-".join(map(str, sizes))
