"""shoal.split: cut a model into the stages of a pipeline, before you rent the machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.catalogue import check_word
from shoal.pipelines.layer_costs import MakeOptimizer
from shoal.pipelines.pipeline import Pipeline, proposed_pipeline
from shoal.pipelines.proposal import Proposal, most_microbatches, propose
from shoal.pipelines.schedules import SCHEDULES
from shoal.pipelines.split_record import split_record
from shoal.pipelines.split_tables import split_text
from shoal.sim.models import Network, byte_count


def split(
    model: nn.Module,
    example_input: Tensor,
    *,
    stages: int,
    microbatches: int | None = None,
    network: Network | str = "1Gbit,100us",
    optimizer: MakeOptimizer = torch.optim.SGD,
    memory: int | str | Sequence[int | str] | None = None,
    chunks: int = 2,
) -> Split:
    """Propose how to cut `model` into stages on as many devices.

    Measures each layer forward and backward with a microbatch of `example_input`, which is a whole batch, on
    the device where the model is. The cuts make the slowest stage as fast as possible, sending included,
    with `memory` on each device ("16GB", or one for each). Then a step is simulated on `network` with each
    schedule, and compared with data parallelism on the same devices. `microbatches` is 4 times the stages by
    default, or the most that the batch allows. `optimizer(parameters)` is asked how much it keeps. `chunks`
    are the stages of interleaved 1F1B on each device.

    Raises ValueError for a model that is no chain of layers, or that does not fit. The model stays as it was.
    """
    if stages < 1 or chunks < 1:
        raise ValueError(f"stages={stages}, chunks={chunks}: a pipeline has at least 1 of each")
    if microbatches is None:
        microbatches = most_microbatches(len(example_input), 4 * stages)
    links = Network.parse(network) if isinstance(network, str) else network
    return Split(
        propose(
            model,
            example_input,
            stages,
            microbatches,
            links,
            optimizer,
            _memories(memory, stages),
            chunks,
        )
    )


class Split:
    """What `shoal.split` proposes. Print it for its tables; call `pipeline` in each process to run it.

    `proposal` has all figures: layers, candidates with their simulated timelines, fully-connected layers.
    """

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal

    @property
    def split_points(self) -> list[str]:
        """The layers at which the second and later stages begin."""
        return [self.proposal.chain.names[first] for first in self.proposal.bounds[1:-1]]

    @property
    def modules(self) -> list[nn.Module]:
        """The stages, for a torch.distributed.pipelining.PipelineStage of your own; they share parameters."""
        return self.proposal.chain.modules(self.proposal.bounds)

    def pipeline(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str | None = None,
        *,
        device: torch.device | str | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> Pipeline:
        """Build this process's part of the pipeline over torch.distributed.

        Every process of the group calls it, after init_process_group; there are as many processes as stages.
        The cuts of process 0 count for all of them. `loss` is the mean over a microbatch; `schedule` is
        gpipe, 1f1b or interleaved, by default the fastest that process 0 found.
        """
        if schedule is not None:
            check_word("schedule", schedule, SCHEDULES)
        return proposed_pipeline(self.proposal, loss, schedule, device, group)

    def record(self) -> dict[str, Any]:
        """The proposal as plain values, as `shoal split --json` writes it."""
        return split_record(self.proposal)

    def __str__(self) -> str:
        return split_text(self.proposal)

    def __repr__(self) -> str:
        proposal = self.proposal
        return f"Split(stages={proposal.stages}, split_points={self.split_points})"


def _memories(memory: int | str | Sequence[int | str] | None, stages: int) -> list[int] | None:
    """The bytes of each device."""
    if memory is None:
        return None
    each = [memory] * stages if isinstance(memory, int | str) else list(memory)
    if len(each) != stages:
        raise ValueError(f"memory names {len(each)} devices, and there are {stages} stages")
    return [byte_count(one) if isinstance(one, str) else one for one in each]
