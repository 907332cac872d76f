"""Schedules of a pipeline: the order in which each device works through the microbatches.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019, here with a flush after every step. Interleaved 1F1B:
Narayanan et al. 2021. The orders are those that torch.distributed.pipelining runs. They are written here
because the list that its Schedule1F1B offers (2.13) leaves out microbatch 0 at the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Action:
    """One microbatch, forward or backward, at one stage. Stage s belongs to device s modulo the devices."""

    stage: int
    kind: str
    microbatch: int

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward pass."""
        return self.kind == FORWARD


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: how many forward passes a device makes before it alternates with backward ones."""

    name: str
    torch_name: str  # of the class in torch.distributed.pipelining
    about: str
    warmup: Callable[[int, int, int, int], int]  # (rank, devices, microbatches, chunks) -> forward passes
    chunked: bool = False  # several stages on each device
    waits_for_sends: bool = False  # between a forward and a backward pass, as torch's does

    def order(self, rank: int, devices: int, microbatches: int, chunks: int = 1) -> list[Action]:
        """What a device does in one step, first to last."""
        forwards = list(_passes(FORWARD, rank, devices, microbatches, chunks))
        backwards = list(_passes(BACKWARD, rank, devices, microbatches, chunks))
        ahead = min(self.warmup(rank, devices, microbatches, chunks), len(forwards))
        mixed = chain.from_iterable(zip_longest(forwards[ahead:], backwards))
        return [*forwards[:ahead], *(action for action in mixed if action is not None)]

    def refusal(self, devices: int, microbatches: int) -> str | None:
        """Why torch does not run this schedule with these numbers; None if it does."""
        if self.name == ONE_F_ONE_B.name and microbatches < devices:
            return f"1F1B needs at least as many microbatches as stages, {devices}"
        if self.chunked and microbatches % _rounds(devices, microbatches):
            return f"interleaved 1F1B needs a number of microbatches that {devices} divides"
        return None


def _rounds(devices: int, microbatches: int) -> int:
    return max(1, microbatches // devices)


def _passes(kind: str, rank: int, devices: int, microbatches: int, chunks: int) -> Sequence[Action]:
    """All forward or all backward passes of a device: a round of microbatches in each of its stages."""
    together = microbatches // _rounds(devices, microbatches) if chunks > 1 else microbatches
    passes = []
    for step in range(microbatches * chunks):
        chunk = step // together % chunks
        chunk = chunk if kind == FORWARD else chunks - 1 - chunk
        microbatch = step // (together * chunks) * together + step % together
        passes.append(Action(chunk * devices + rank, kind, microbatch))
    return passes


def _interleaved_warmup(rank: int, devices: int, microbatches: int, chunks: int) -> int:
    together = microbatches // _rounds(devices, microbatches)
    return (chunks - 1) * together + 2 * (devices - 1 - rank)


GPIPE = PipelineSchedule(
    "GPipe",
    "GPipe",
    "all forward passes, then all backward passes",
    lambda rank, devices, microbatches, chunks: microbatches,
)
ONE_F_ONE_B = PipelineSchedule(
    "1F1B",
    "1F1B",
    "alternates as soon as it can: the same bubble as GPipe, fewer activations in memory",
    lambda rank, devices, microbatches, chunks: devices - 1 - rank,
    waits_for_sends=True,
)
INTERLEAVED = PipelineSchedule(
    "interleaved 1F1B",
    "Interleaved1F1B",
    "several stages on each device: a shorter bubble, more messages",
    _interleaved_warmup,
    chunked=True,
)

SCHEDULES = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}
"""By the word of the command line."""
