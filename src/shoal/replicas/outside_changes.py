"""OutsideChanges: notices weights that the loop has changed beside `optimizer.step()`."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.progress import Progress

SAMPLED = 1000
"""About how many weights are compared at a step. Each step takes others: a change of many is seen at once."""

ROUNDING = 4
"""Rounding errors, of the largest weight, that are no change: a loop may add something and take it back."""

STEPS_BETWEEN_READS = 50
"""On a GPU the answer is read so seldom, as reading it waits for the GPU."""


class OutsideChanges:
    """Compares a sample of the weights `x` at a step with what it was when Shoal last gave them to the loop.

    For a strategy, here its `name`, that would undo such changes or go beyond them.
    """

    def __init__(self, x: Tensor, name: str, progress: Progress) -> None:
        self._x = x
        self._name = name
        self._progress = progress
        self._stride = max(1, x.numel() // SAMPLED)
        self._waits = x.device.type != "cpu"  # whether to read the answer takes time
        self._offset = self._steps = 0
        self._has_changed = torch.zeros((), dtype=torch.bool, device=x.device)
        self.begin()

    def begin(self) -> None:
        """The loop goes on with the weights as they are now."""
        self._offset = (self._offset + 1) % self._stride
        self._now = self._x[self._offset :: self._stride]
        self._before = self._now.clone()

    def check(self) -> None:
        """The loop has called `step()`. Raises ValueError if it has changed weights itself."""
        before, now = self._before, self._now
        self._steps += 1
        if self._waits or not torch.equal(now, before):
            slack = ROUNDING * torch.finfo(before.dtype).eps * before.abs().max()
            self._has_changed |= ((now - before).abs() > slack).any()  # False for NaN
        if self._waits and self._steps % STEPS_BETWEEN_READS != 1:
            return
        if bool(self._has_changed):
            raise ValueError(
                f"the loop changed weights beside the attached optimizer before step {self._progress.t}, and "
                f"{self._name} would undo that or overshoot; change weights before attach(), or take "
                "strategy 'sync' or 'local'"
            )
