"""Model averaging, also called local SGD (Zinkevich et al. 2010; Povey et al. 2014; Stich 2018).

With a penalty it is EDiT's average, in which workers that went astray count less (Cheng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shoal.core.limits import above, at_least
from shoal.core.vector import layers_of
from shoal.vocabulary.merged_blocks import check_overlap, merged_blocks
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Blockwise

WINDOW = 120  # averages before any displacement counts as an outlier, and z-scores that are remembered
OUTLIER = 3.0  # standard deviations above the mean
MEMORY = 0.02  # alpha: weight of the newest norm in their mean and variance


@dataclass(frozen=True)
class Local(Blockwise):
    """Everyone trains alone for a while; then all models become their average."""

    period: int = 16  # tau: local steps between two averages
    warmup: int = 0  # first steps, averaged one by one
    reset_momentum: bool = True  # local velocity points where the worker was going, not the average
    blocks: int | None = (
        None  # M: the data in so many blocks; an average after a pass over one's split of each
    )
    penalty: float | None = None  # T: EDiT weighs each layer by softmax(-norm / T); None: all count alike
    clip: float = 10.0  # phi: longest step of a layer, where there is a penalty
    overlap: int = 0  # 1: a mean is taken in one block late, so that nobody waits for it

    def __post_init__(self) -> None:
        self.check_blocks()
        at_least(0, warmup=self.warmup)
        above(0, penalty=self.penalty, clip=self.clip)
        if self.penalty is None and self.clip != type(self).clip:
            raise ValueError(f"clip={self.clip:g} belongs to a penalty; give penalty=1 too")
        check_overlap(self.overlap)
        if self.overlap and self.penalty is not None:
            raise ValueError("overlap=1 and a penalty: its weights need the norms of all before the mean")

    @property
    def looks_at(self) -> str:
        return "" if self.penalty is None else "the norms of whole layers"

    async def worker(self, w: Node) -> None:
        average = w.keep("average", w.x)
        if self.penalty is not None:
            await self._merge_with_penalty(w, average, Penalty(w, self.penalty, self.clip))
            return
        async for merged in merged_blocks(w, average, self.block_steps(w), self.warmup, self.overlap):
            average += merged.update
            if self.reset_momentum:
                w.reset_momentum()

    async def _merge_with_penalty(self, w: Node, average: Tensor, penalty: Penalty) -> None:
        async for t in w.blocks(self.block_steps(w), self.warmup):
            displacement = w.x - average
            if t < self.warmup:  # a single step's norm says nothing of a block's
                average += await w.mean(displacement)
            else:
                average += await penalty.merge(displacement)
            w.x.copy_(average)
            if self.reset_momentum:
                w.reset_momentum()

    def solution(self, node: Node) -> Tensor:
        return node.keep("average", node.x)


class Penalty:
    """One worker's part in averages that weigh each layer by how far it went (EDiT)."""

    def __init__(self, w: Node, temperature: float, clip: float) -> None:
        self._w, self._temperature, self._clip = w, temperature, clip
        self._layers = layers_of(w.pieces)
        nothing = torch.zeros(len(self._layers), dtype=torch.float64)
        self._mean, self._variance = w.keep("norms", nothing), w.keep("variances of norms", nothing)
        self._scores = w.keep("z-scores", torch.zeros(WINDOW, len(self._layers), dtype=torch.float64))
        self._number = w.keep("averages", nothing.long())  # finite norms so far, of each layer

    async def merge(self, displacement: Tensor) -> Tensor:
        """The weighted mean of all workers' displacements, each layer no longer than the clip."""
        w, own = self._w, self._w.unmerged
        norms = torch.stack([displacement[layer].norm() for layer in self._layers]).double().cpu()
        if own:
            norms = torch.where(self._note(norms), inf, norms)  # an outlier has no weight
        else:  # this worker's data has ended
            norms.fill_(inf)
        rank = torch.tensor([w.rank], dtype=norms.dtype)
        found = await w.gather((torch.cat((rank, norms)),), self._weigh, merges=False)
        shares = Shares(found.view(-1, 2 + len(self._layers)))
        self._scale(displacement, shares.factors(w.rank))
        merged = await w.mean(displacement)
        self._scale(merged, shares.rest(w.contributors))
        lengths = torch.stack([merged[layer].norm() for layer in self._layers])
        self._scale(merged, (self._clip / (lengths + 1e-6)).clamp(max=1.0))
        return merged

    def _scale(self, v: Tensor, factors: Tensor) -> None:
        for layer, factor in zip(self._layers, factors.tolist(), strict=True):
            if factor:
                v[layer] *= factor
            else:  # also where it is not finite
                v[layer].zero_()

    def _weigh(self, given: list[tuple[float, tuple[Tensor, ...]]]) -> Tensor:
        """A row for each worker: its rank, its samples, and its share in each layer; all in one vector."""
        brought = torch.stack([parts[0].cpu() for _, parts in given])
        samples = torch.tensor([[weight] for weight, _ in given], dtype=brought.dtype)
        ranks, norms = brought[:, :1], brought[:, 1:]
        finite = torch.where(norms.isfinite(), norms, torch.nan)
        median = torch.nanquantile(finite, 0.5, dim=0).nan_to_num(1.0).clamp(min=1e-30)
        shares = torch.softmax(-norms / median / self._temperature, dim=0).nan_to_num(0.0)
        return torch.cat((ranks, samples, shares), dim=1).flatten()

    def _note(self, norms: Tensor) -> Tensor:
        """Which of the norms are outliers beside this worker's earlier ones, to which it adds the finite."""
        is_finite, number = norms.isfinite(), self._number
        self._mean.copy_(torch.where(is_finite & (number == 0), norms, self._mean))
        away = torch.where(is_finite, norms - self._mean, 0.0)
        deviation = self._variance.sqrt()
        scores = torch.where(deviation > 0, away / deviation, 0.0)
        limit = OUTLIER * self._scores.std(dim=0).clamp(min=1.0)
        is_outlier = ~is_finite | ((scores > limit) & (number >= WINDOW))
        self._scores[number % WINDOW, torch.arange(len(number))] = torch.where(is_outlier, 0.0, scores)
        # outliers count here, too: else a lasting rise would stop training for good
        self._mean.add_(away, alpha=MEMORY)
        fresh = (1 - MEMORY) * (self._variance + MEMORY * (1 - MEMORY) * away**2)
        self._variance.copy_(torch.where(is_finite, fresh, self._variance))
        self._number += is_finite
        return is_outlier


@dataclass(frozen=True)
class Shares:
    """How much each worker counts in each layer, though a mean weighs by samples."""

    table: Tensor  # a row for each worker: its rank, its samples, its shares

    def factors(self, rank: int) -> Tensor:
        """What a worker multiplies each layer by before the mean."""
        _, samples, *shares = self.table[self.table[:, 0] == rank].flatten()
        return torch.stack(shares) * self.table[:, 1].sum() / (samples or 1.0)

    def rest(self, contributors: Sequence[int]) -> Tensor:
        """What the mean is to be multiplied by: 1, unless somebody died before it."""
        came = self.table[[row[0] in contributors for row in self.table]]
        part = came[:, 1].sum() / self.table[:, 1].sum()
        return (part / came[:, 2:].sum(dim=0)).nan_to_num(0.0, posinf=0.0)
