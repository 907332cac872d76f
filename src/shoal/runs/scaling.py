"""The learning rate of N workers: what the words of `scale_lr` multiply the task's own rate by."""

from __future__ import annotations

from math import sqrt

import torch

from shoal.core.growth import LARGEST_SHARE
from shoal.core.task import Task
from shoal.vocabulary.strategy import Sends, Strategy


def lr_factor(word: str, strategy: Strategy, workers: int, task: Task, samples: int) -> float:
    """What the learning rate is multiplied by; `samples` are those of the training data."""
    if word == "none":
        return 1.0
    if word == "linear":
        return float(workers)
    if word == "sqrt":
        return sqrt(workers)
    return _auto(strategy, workers, task, samples)


def _auto(strategy: Strategy, workers: int, task: Task, samples: int) -> float:
    """Make up for the steps that averages cost, as far as the noise of a step allows.

    A mean of n gradients has n times less noise than one: n times the rate (Goyal et al. 2017). A worker that
    steps on its own batch between averages has the noise of that batch: the square root of n. Optimizers that
    divide by the gradient's size take the square root, too (Malladi et al. 2022). All of this is for batches
    much smaller than the data (Smith et al. 2018): the factor is as if at most a twentieth of it were in one.
    """
    averaged = max(1.0, strategy.steps_per_update(workers))
    if averaged == 1:
        return 1.0
    linear = _averages_gradients(strategy) and _is_sgd(task)
    largest = max(1.0, LARGEST_SHARE * samples / task.batch)
    return min(averaged if linear else sqrt(averaged), largest)


def _averages_gradients(strategy: Strategy) -> bool:
    """Whether a step is taken with the mean gradient, by all workers together or by a server."""
    return strategy.sends is Sends.MEAN_GRADIENTS or (
        strategy.sends is Sends.GRADIENTS and strategy.servers > 0
    )


def _is_sgd(task: Task) -> bool:
    """Whether the task's optimizer, which may come from a function, is SGD."""
    return isinstance(task.optimizer([torch.zeros(2, 2, requires_grad=True)], lr=task.lr), torch.optim.SGD)
