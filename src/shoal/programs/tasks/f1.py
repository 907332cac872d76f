"""Macro-averaged F1 score: rare classes count as much as frequent ones (van Rijsbergen 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.task import UNLABELLED


def macro_f1(out: Tensor, y: Tensor) -> float:
    """The mean over classes of 2 hits / (predictions + labels), in per cent.

    A class with labels but no predictions scores 0. A class with neither is left out of the mean.
    """
    labelled = y != UNLABELLED
    predicted, actual = out.argmax(dim=-1)[labelled], y[labelled]
    classes = out.shape[-1]
    hits = torch.bincount(actual[predicted == actual], minlength=classes)
    either = torch.bincount(predicted, minlength=classes) + torch.bincount(actual, minlength=classes)
    return 100.0 * float((2 * hits[either > 0] / either[either > 0]).mean())
