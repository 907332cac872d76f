"""Model averaging, also called local SGD (Zinkevich et al. 2010; Povey et al. 2014; Stich 2018).

With a penalty it is EDiT's average, in which workers that went astray count less (Cheng et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shoal.core.limits import above, at_least
from shoal.core.vector import layers_of
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

    def __post_init__(self) -> None:
        self.check_blocks()
        at_least(0, warmup=self.warmup)
        above(0, penalty=self.penalty, clip=self.clip)
        if self.penalty is None and self.clip != type(self).clip:
            raise ValueError(f"clip={self.clip:g} belongs to a penalty; give penalty=1 too")

    async def worker(self, w: Node) -> None:
        average = w.keep("average", w.x)
        penalty = None if self.penalty is None else Penalty(w, self.penalty, self.clip)
        async for _ in w.blocks(self.block_steps(w), self.warmup):
            displacement = w.x - average
            average += await (w.mean(displacement) if penalty is None else penalty.merge(displacement))
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
        self._number = w.keep("averages", torch.tensor(0))

    async def merge(self, displacement: Tensor) -> Tensor:
        """The weighted mean of all workers' displacements, each layer no longer than the clip."""
        w, own = self._w, self._w.unmerged
        norms = torch.stack([displacement[layer].norm() for layer in self._layers]).double().cpu()
        if own:
            norms = torch.where(self._note(norms), inf, norms)  # an outlier has no weight
        else:  # this worker's data has ended
            norms.fill_(inf)
        found = await w.gather((norms,), self._weigh, merges=False)
        median, total, samples = torch.split(found, len(self._layers))
        weights = torch.exp(-norms / median / self._temperature - total).nan_to_num(0.0)
        weights *= samples / (own or 1.0)  # a mean weighs by samples, too
        for layer, weight in zip(self._layers, weights.tolist(), strict=True):
            displacement[layer] *= weight
        merged = await w.mean(displacement)
        for layer in self._layers:
            merged[layer] *= min(1.0, self._clip / (float(merged[layer].norm()) + 1e-6))
        return merged

    def _weigh(self, given: list[tuple[float, tuple[Tensor, ...]]]) -> Tensor:
        """For each layer the median norm, the logarithm of all weights' sum, and all samples."""
        norms = torch.stack([parts[0].cpu() for _, parts in given])
        finite = torch.where(norms.isfinite(), norms, torch.nan)
        median = torch.nanquantile(finite, 0.5, dim=0).nan_to_num(1.0).clamp(min=1e-30)
        total = torch.logsumexp(-norms / median / self._temperature, dim=0)
        return torch.cat((median, total, torch.full_like(median, sum(weight for weight, _ in given))))

    def _note(self, norms: Tensor) -> Tensor:
        """Which of the norms are outliers beside this worker's earlier ones, into which the others go."""
        if self._number == 0:
            self._mean.copy_(norms)
        deviation = self._variance.sqrt()
        scores = torch.where(deviation > 0, (norms - self._mean) / deviation, 0.0)
        limit = OUTLIER * self._scores.std(dim=0).clamp(min=1.0)
        is_outlier = (scores > limit) & (self._number >= WINDOW)
        self._scores[int(self._number) % WINDOW] = torch.where(is_outlier, 0.0, scores)
        away = torch.where(is_outlier, 0.0, norms - self._mean)
        self._mean.add_(away, alpha=MEMORY)
        rest = torch.where(is_outlier, 0.0, norms - self._mean)
        fresh = (1 - MEMORY) * (self._variance + MEMORY * away * rest)
        self._variance.copy_(torch.where(is_outlier, self._variance, fresh))
        self._number += 1
        return is_outlier
