"""Whether a loss is a function of the parameters: a line search needs one that repeats."""

from __future__ import annotations

import copy
from math import isclose

import torch
from torch import nn

from shoal.core.task import Data, Task

TOLERANCE = 1e-4
"""Relative difference of two losses that rounding may explain."""

_RANDOM = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU),
)


def check_nothing_is_drawn(task: Task, model: nn.Module) -> None:
    """Raise ValueError for augmentation, or a layer that draws at random in training, as dropout does."""
    if task.augment is not None:
        raise ValueError(
            f"task {task.name!r} augments its data at random, and a line search compares losses of the same "
            "samples; leave augment out, or take strategy 'downpour'"
        )
    for name, module in model.named_modules():
        if isinstance(module, _RANDOM) and module.training and getattr(module, "p", 1.0) > 0:
            raise ValueError(
                f"{name or 'the model'} is {type(module).__name__}, which draws at random, and a line search "
                "needs a loss that is a function of the parameters; leave it out, or take strategy 'downpour'"
            )


def check_repeats(task: Task, model: nn.Module, data: Data) -> None:
    """Raise ValueError if the loss of the same samples differs between two evaluations."""
    x, y = data.x[: task.batch], data.y[: task.batch]
    losses = []
    for seed in range(2):
        twin = copy.deepcopy(model)  # running statistics must stay what they were
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
            torch.manual_seed(seed)
            losses.append(task.loss(twin(x), y))
    if any(loss.numel() != 1 for loss in losses):
        raise ValueError(f"task {task.name!r} tells gradients and no loss, which a line search needs")
    first, second = (float(loss) for loss in losses)
    if not isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise ValueError(
            f"the loss of the same samples was {first:g} and then {second:g}: task {task.name!r} draws "
            "something at random, and a line search needs a function of the parameters; take 'downpour'"
        )
