"""Evaluation of a model on a task's test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shoal.core.task import UNLABELLED, Data, Task
from shoal.core.vector import is_statistic, named_buffers

Buffers: TypeAlias = Mapping[str, Tensor]
"""A module's buffers, by name."""

ROWS = 1000  # batch size of the evaluation


@dataclass(frozen=True)
class Score:
    """A model's figures on the test set."""

    loss: float  # mean
    accuracy: float | None  # percent; None where labels are not classes
    metrics: dict[str, float]  # the task's own


@torch.no_grad()
def load_mean_buffers(model: nn.Module, of_workers: Sequence[Buffers]) -> None:
    """Give a model the mean of the workers' running statistics; other buffers are the first worker's."""
    for name, buffer in named_buffers(model):
        values = [buffers[name].to(buffer.device) for buffers in of_workers]
        if not values:
            continue
        if is_statistic(name, buffer):
            buffer.copy_(torch.stack([value.double() for value in values]).mean(0))
        else:
            buffer.copy_(values[0])


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, data: Data) -> Score:
    """Evaluate `model` on the test set. Without labelled test samples the loss is NaN and the rest empty."""
    if len(data.test_y) == 0:
        return Score(float("nan"), None, {})
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    kept, loss, right, counted, classes = [], 0.0, 0, 0, False
    for x, y in zip(torch.split(data.test_x, ROWS), torch.split(data.test_y, ROWS), strict=True):
        out = model(x)
        classes = _is_classes(out, y)
        count = int((y != UNLABELLED).sum()) if classes else len(y)
        if count:
            loss += float(task.loss(out, y)) * count
            right += int((out.argmax(dim=-1) == y).sum()) if classes else 0
            counted += count
        if task.metrics:
            kept.append(out)
    for module, was_training in modes:
        module.training = was_training  # not by train(): a part that was left in eval() stays there
    if not counted:
        return Score(float("nan"), None, {})
    metrics = {name: metric(torch.cat(kept), data.test_y) for name, metric in task.metrics.items()}
    return Score(loss / counted, 100.0 * right / counted if classes else None, metrics)


def _is_classes(out: Tensor, y: Tensor) -> bool:
    """Whether the labels are indices of classes in the outputs' last dimension."""
    return out.shape[:-1] == y.shape and y.ndim > 0 and not y.is_floating_point()
