"""A pipeline on real processes: torch.distributed.pipelining runs the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from shoal.pipelines.chain import Chain
from shoal.pipelines.partition import Bounds
from shoal.pipelines.proposal import Proposal
from shoal.pipelines.schedules import GPIPE, SCHEDULES, PipelineSchedule

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This process's part of a pipeline. Give `parameters()` to an optimizer and call `step` for a batch.

    `schedule` is torch's own schedule, `modules` are the stages that run here. A weight that several stages
    share is the same in all of them: its gradients are added up after every step.
    """

    def __init__(
        self,
        chain: Chain,
        bounds: Bounds,
        schedule: PipelineSchedule,
        microbatches: int,
        loss: Loss,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._loss = group, loss
        self.rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.bounds, self.microbatches = tuple(bounds), microbatches
        stages, rest = divmod(len(self.bounds) - 1, self._size)
        if rest or (stages > 1 and not schedule.chunked):
            raise ValueError(
                f"{schedule.name} of {len(self.bounds) - 1} stages needs a process for each, or equally many "
                f"stages in each if it is interleaved; this group has {self._size}"
            )
        if refusal := schedule.refusal(self._size, microbatches):
            raise ValueError(f"{microbatches} microbatches: {refusal}")
        self._device = torch.device(device or next(chain.model.parameters()).device)
        self._kind, self._numbers = schedule, range(self.rank, len(self.bounds) - 1, self._size)
        self.modules = [
            chain.module(self.bounds[index], self.bounds[index + 1]).to(self._device)
            for index in self._numbers  # the other stages' parameters are left alone
        ]
        self.schedule = self._make(schedule, microbatches)
        self._others: dict[int, tuple[Any, int]] = {}  # for batches of other sizes, by samples
        self._samples: int | None = None  # of the batches that `schedule` is for
        self._tied = self._tie(chain)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the stages that run here."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def step(self, x: Tensor, y: Tensor) -> float | None:
        """Compute the gradients of a batch in all processes; returns the mean loss where the last stage runs.

        Every process calls it: the first stage reads `x`, the last one `y`. Gradients are those of the mean
        over the batch, as without a pipeline; those of an earlier step are dropped. A batch of another size
        than the first has fewer microbatches if theirs does not divide it. Where the last stage runs, raises
        ValueError if the loss of the batch is not the mean of its microbatches' losses.
        """
        for parameter in self.parameters():
            parameter.grad = None
        losses: list[Tensor] = []
        schedule, microbatches = self._schedule_for(len(x))
        inputs = (x,) if self.rank == 0 else ()
        out = schedule.step(*inputs, **({"target": y, "losses": losses} if self.has_last_stage else {}))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(microbatches)
        for parameter, among in self._tied:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=among)
        return self._mean(torch.stack(losses).detach(), out, y) if losses else None

    @property
    def name(self) -> str:
        """The name of its schedule."""
        return self._kind.name

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage, which computes the loss, runs here: in the last process."""
        return self.rank == self._size - 1

    def _make(self, schedule: PipelineSchedule, microbatches: int) -> Any:
        """Torch's schedule for the stages of this process.

        It does not scale gradients: a weight that two stages of one process share would be scaled twice.
        """
        parts = [
            PipelineStage(module, index, len(self.bounds) - 1, self._device, group=self._group)
            for index, module in zip(self._numbers, self.modules, strict=True)
        ]
        made: Any = get_schedule_class(schedule.torch_name)
        stages = parts if schedule.chunked else parts[0]
        return made(stages, microbatches, loss_fn=self._loss, scale_grads=False)

    def _mean(self, losses: Tensor, out: Tensor, y: Tensor) -> float:
        """The mean of the microbatches' losses. Raises ValueError if the loss of the batch is another.

        Looks at every batch: where few labels are ignored, the first batches may have none of them.
        """
        mean = float(losses.mean())
        if len(losses) > 1:
            with torch.no_grad():
                whole = float(self._loss(out.detach(), y))
            share = max(1e-4, 8 * torch.finfo(losses.dtype).eps)  # sums round differently
            apart = abs(whole - mean) > share * max(0.01, float(losses.abs().max()))
            if apart or isfinite(whole) != isfinite(mean):
                raise ValueError(
                    f"the loss of a batch, {whole:g}, is not the mean of its microbatches' losses, {mean:g}, "
                    "as with ignore_index or class weights; take another layout"
                )
        return mean

    def _schedule_for(self, samples: int) -> tuple[Any, int]:
        """The schedule for a batch of so many samples, and its microbatches, which are of equal size."""
        if self._samples is None and samples % self.microbatches == 0:
            self._samples = samples
        if samples == self._samples:
            return self.schedule, self.microbatches
        if samples not in self._others:  # torch's stages prepare their messages once, for one size
            kind, number = suited(self._kind, self._size, samples, self.microbatches)
            self._others[samples] = self._make(kind, number), number
        return self._others[samples]

    def _tie(self, chain: Chain) -> Sequence[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Make the copies of tied parameters equal, and return this process's with their groups."""
        named, tied = dict(chain.model.named_parameters()), []
        for name, stages in chain.uses(self.bounds):
            ranks = sorted({stage % self._size for stage in stages})
            if len(ranks) > 1 and self.rank in ranks:
                everyone = dist.get_process_group_ranks(self._group)
                members = [everyone[rank] for rank in ranks]
                among = dist.new_group(members, use_local_synchronization=True)
                dist.broadcast(named[name].data, group=among, group_src=0)
                tied.append((named[name], among))
        return tied


def suited(schedule: PipelineSchedule, devices: int, samples: int, most: int) -> tuple[PipelineSchedule, int]:
    """A schedule and a number of equal microbatches, up to `most`, for a batch of so many samples.

    GPipe where this schedule runs with no such number: it computes the same.
    """
    numbers = [number for number in range(min(most, samples), 0, -1) if samples % number == 0]
    fitting = [number for number in numbers if schedule.refusal(devices, number) is None]
    return (schedule, fitting[0]) if fitting else (GPIPE, numbers[0])


def proposed_pipeline(
    proposal: Proposal,
    loss: Loss,
    word: str | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Pipeline:
    """The pipeline that process 0 of the group proposes: each has measured, and they must not differ."""
    size = dist.get_world_size(group)
    if size != proposal.stages:
        raise ValueError(
            f"a split into {proposal.stages} stages needs as many processes, and this group has {size}"
        )
    place = torch.device(device or next(proposal.chain.model.parameters()).device)

    def of_first(numbers: Sequence[int]) -> list[int]:
        told = torch.tensor(numbers, device=place)
        dist.broadcast(told, group=group, group_src=0)
        whole: list[int] = told.tolist()
        return whole

    if word is None:
        words, best = list(SCHEDULES), proposal.best_pipeline
        (index,) = of_first([words.index(best.word) if best else -1])
        if index < 0:
            raise ValueError("no schedule can be taken; print the split for the reasons, or name a schedule")
        word = words[index]
    chosen = SCHEDULES[word]
    bounds = tuple(of_first(proposal.bounds_of(chosen)))
    return Pipeline(proposal.chain, bounds, chosen, proposal.microbatches, loss, place, group)
