"""F1: how well classes are found, rare ones as important as frequent ones (van Rijsbergen 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.task import UNLABELLED


def macro_f1(out: Tensor, y: Tensor) -> float:
    """The mean over classes of 2 hits / (times predicted + times there), in per cent.

    A class that is there and never predicted has 0; one that is neither there nor predicted does not count.
    """
    counts = y != UNLABELLED
    said, there = out.argmax(dim=-1)[counts], y[counts]
    classes = out.shape[-1]
    hits = torch.bincount(there[said == there], minlength=classes)
    either = torch.bincount(said, minlength=classes) + torch.bincount(there, minlength=classes)
    return 100.0 * float((2 * hits[either > 0] / either[either > 0]).mean())
