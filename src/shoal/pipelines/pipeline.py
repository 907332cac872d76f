"""A proposed split on real processes: torch.distributed.pipelining runs the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from shoal.pipelines.proposal import Proposal
from shoal.pipelines.schedules import SCHEDULES


class Pipeline:
    """This process's part of a pipeline. Give `parameters()` to an optimizer and call `step` for a batch.

    `schedule` is torch's own schedule, `modules` are the stages that run here. A weight that stages in
    several processes share is the same in all of them: its gradients are added up after every step.
    """

    def __init__(
        self,
        proposal: Proposal,
        loss: Callable[[Tensor, Tensor], Tensor],
        word: str | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != proposal.stages:
            raise ValueError(
                f"a split into {proposal.stages} stages needs as many processes, and this group has {size}"
            )
        place = torch.device(device or next(proposal.chain.model.parameters()).device)
        chosen = SCHEDULES[word or self._fastest(proposal, place)]
        if refusal := chosen.refusal(size, proposal.microbatches):
            raise ValueError(f"{proposal.microbatches} microbatches: {refusal}")
        self.bounds = tuple(self._of_first(proposal.bounds_of(chosen), place))
        stages = range(self.rank, len(self.bounds) - 1, size)
        self._last = (len(self.bounds) - 2) % size  # the process of the last stage
        self.modules = [
            module.to(place)
            for index, module in enumerate(proposal.modules(self.bounds))
            if index in stages  # the other stages' parameters are left alone
        ]
        parts = [
            PipelineStage(module, index, len(self.bounds) - 1, place, group=group)
            for index, module in zip(stages, self.modules, strict=True)
        ]
        made: Any = get_schedule_class(chosen.torch_name)
        self.schedule = made(parts if chosen.chunked else parts[0], proposal.microbatches, loss_fn=loss)
        self._tied = self._tie(proposal, size)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the stages that run here."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def step(self, x: Tensor, y: Tensor) -> float | None:
        """Compute the gradients of a batch in all processes; returns the mean loss where the last stage runs.

        Every process calls it: the first stage reads `x`, the last one `y`. Gradients are those of the mean
        over the batch, as without a pipeline; those of an earlier step are dropped.
        """
        for parameter in self.parameters():
            parameter.grad = None
        losses: list[Tensor] = []
        inputs = (x,) if self.rank == 0 else ()
        last = {"target": y, "losses": losses} if self.rank == self._last else {}
        self.schedule.step(*inputs, **last)
        for parameter, among in self._tied:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=among)
        return float(torch.stack(losses).detach().mean()) if losses else None

    def _of_first(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The numbers of process 0: each process has measured its own times, and they must not differ."""
        told = torch.tensor(numbers, device=device)
        dist.broadcast(told, group=self._group, group_src=0)
        whole: list[int] = told.tolist()
        return whole

    def _fastest(self, proposal: Proposal, device: torch.device) -> str:
        """The schedule that process 0 found fastest. Raises ValueError, in all processes, if none fits."""
        words, best = list(SCHEDULES), proposal.best_pipeline
        (index,) = self._of_first([words.index(best.word) if best else -1], device)
        if index < 0:
            raise ValueError("no schedule can be taken; print the split for the reasons, or name a schedule")
        return words[index]

    def _tie(self, proposal: Proposal, size: int) -> Sequence[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Make the copies of tied parameters equal, and return this process's with their groups."""
        named, tied = dict(proposal.chain.model.named_parameters()), []
        for name, stages in proposal.uses(self.bounds):
            ranks = sorted({stage % size for stage in stages})
            if len(ranks) < len(stages):
                raise ValueError(
                    f"stages {stages} share {name!r} and some of them run in one process, where torch would "
                    "scale its gradient twice; take schedule 'gpipe' or '1f1b'"
                )
            if len(ranks) > 1 and self.rank in ranks:
                everyone = dist.get_process_group_ranks(self._group)
                members = [everyone[rank] for rank in ranks]
                among = dist.new_group(members, use_local_synchronization=True)
                dist.broadcast(named[name].data, group=among, group_src=0)
                tied.append((named[name], among))
        return tied
