"""Score: how good a model is on a task's test set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.task import UNLABELLED, Data, Task


@dataclass(frozen=True)
class Score:
    """How good a model is on the test set."""

    loss: float
    accuracy: float | None  # percent; None where labels are no classes
    metrics: dict[str, float]


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, data: Data) -> Score:
    """Mean test loss, how many classes are right in percent where labels are classes, the task's metrics."""
    if len(data.test_y) == 0:
        return Score(float("nan"), None, {})
    was_training = model.training
    model.eval()
    parts = zip(torch.split(data.test_x, 1000), torch.split(data.test_y, 1000), strict=True)
    tested = [(model(x), y) for x, y in parts]
    model.train(was_training)
    counts = [int((y != UNLABELLED).sum()) if _is_classes(out, y) else len(y) for out, y in tested]
    losses = [float(task.loss(out, y)) * count for (out, y), count in zip(tested, counts, strict=True)]
    right = None
    if _is_classes(*tested[0]):
        right = sum(int((out.argmax(dim=-1) == y).sum()) for out, y in tested)
    outputs, labels = torch.cat([out for out, _ in tested]), data.test_y
    return Score(
        sum(losses) / sum(counts),
        None if right is None else 100.0 * right / sum(counts),
        {name: metric(outputs, labels) for name, metric in task.metrics.items()},
    )


def _is_classes(out: Tensor, y: Tensor) -> bool:
    """Whether the labels number the classes that the outputs' last dimension is about."""
    return out.shape[:-1] == y.shape and y.ndim > 0 and not y.is_floating_point()
