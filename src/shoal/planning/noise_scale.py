"""The gradient noise scale: how many samples a step can use (McCandlish et al. 2018).

The gradient of one sample has mean G and covariance Sigma. The squared length of a mean of B gradients is
|G|^2 + tr Sigma / B on average, so two batch sizes tell both. Their ratio, B_simple = tr Sigma / |G|^2, is of
the order of the batch beyond which a larger one saves few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from time import process_time

import torch
from torch import Tensor

from shoal.core.task import Data, Task
from shoal.core.vector import trainable
from shoal.replicas.module import build_model

DECAY = 0.99
LEAST_UPDATES = 100
"""Before so many, nothing is told: the ratio of one step is useless, its denominator is often negative."""

PARTS = 2
"""Parts of a batch whose gradients are compared."""


@dataclass
class NoiseScale:
    """Running means of the two unbiased estimators, each by itself."""

    decay: float = DECAY
    updates: int = 0
    _spread: float = 0.0  # of S, tr Sigma
    _slope: float = 0.0  # of |G|^2

    def add(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Take in the mean gradients of equal parts, of `samples` each, of one batch."""
        spread, slope = estimates(gradients, samples)
        self._spread += (1 - self.decay) * (spread - self._spread)
        self._slope += (1 - self.decay) * (slope - self._slope)
        self.updates += 1

    @property
    def value(self) -> float | None:
        """B_simple in samples; None as long as nobody can tell."""
        if self.updates < LEAST_UPDATES or not (self._slope > 0 and isfinite(self._spread)):
            return None  # not a number, too, after a loss that was none
        return self._spread / self._slope  # both lack the same factor, 1 - decay ** updates


def estimates(gradients: Sequence[Tensor], samples: int) -> tuple[float, float]:
    """Unbiased estimates of tr Sigma and |G|^2 from the gradients of N parts of `samples` each.

    S = b / (N - 1) sum |g_k - g|^2 and |G|^2 = |g|^2 - S / (N b), where g is the mean of all g_k.
    """
    stacked = torch.stack(list(gradients)).double()
    mean = stacked.mean(0)
    spread = samples * float((stacked - mean).square().sum()) / (len(stacked) - 1)
    return spread, float(mean.square().sum()) - spread / (len(stacked) * samples)


def useful_workers(noise: float, batch: int) -> tuple[int, int]:
    """Workers up to which each is worth its samples, and those beyond which more save hardly a step."""
    return max(1, round(noise / batch)), max(1, round(4 * noise / batch))


def measure_noise(
    task: Task, data: Data, updates: int = 2 * LEAST_UPDATES, seed: int = 0, seconds: float = inf
) -> NoiseScale:
    """The noise scale early in training: each step compares the gradients of the halves of its batch.

    After so many seconds of the processor it makes no more updates than it must. A batch of one sample, or a
    larger one than the data, makes none.
    """
    half, threads = task.batch // PARTS, torch.get_num_threads()
    if half < 1 or len(data.x) < task.batch:
        return NoiseScale()
    torch.set_num_threads(1)  # as the short runs do, whose time is foretold by this
    try:
        return _measured(task, data, updates, seed, half, seconds)
    finally:
        torch.set_num_threads(threads)


def _measured(task: Task, data: Data, updates: int, seed: int, half: int, seconds: float) -> NoiseScale:
    model = build_model(task, seed)
    parameters, _ = trainable(model)
    optimizer, noise = task.optimizer(parameters, lr=task.lr), NoiseScale()
    generator, began = torch.Generator().manual_seed(seed), process_time()
    for _ in range(updates):
        if noise.updates >= LEAST_UPDATES and process_time() - began > seconds:
            break
        rows = torch.randint(len(data.x), (PARTS, half), generator=generator)
        gradients = []
        for part in rows:
            loss = task.loss(model(data.x[part]), data.y[part])
            gradients.append(torch.autograd.grad(loss, parameters))
        noise.add([torch.cat([g.flatten() for g in each]) for each in gradients], half)
        for p, *each in zip(parameters, *gradients, strict=True):
            p.grad = torch.stack(each).mean(0)
        optimizer.step()
    return noise
