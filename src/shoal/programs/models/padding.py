"""Sequences of different lengths in one tensor that carries a mask of the lengths.

The last channel is 1 at frames of the sequence and 0 at padding. Whole sequences can thus be the samples of a
task, and are shuffled, split among workers and moved between devices like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from shoal.core.task import UNLABELLED


def pad(sequences: Sequence[Tensor]) -> Tensor:
    """Sequences of (frames, channels) as (sequences, longest length, channels + 1)."""
    return pad_sequence([F.pad(frames, (0, 1), value=1.0) for frames in sequences], batch_first=True)


def pad_labels(labels: Sequence[Tensor]) -> Tensor:
    """Labels of (frames) as (sequences, longest length); padding is UNLABELLED."""
    return pad_sequence(list(labels), batch_first=True, padding_value=UNLABELLED)


def unpad(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the result of `pad` into the padded sequences and their lengths."""
    return x[..., :-1], x[..., -1].sum(dim=1).long()


class Padded(nn.Module):
    """Wraps a model that takes frames and lengths, so that it takes the result of `pad`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(*unpad(x))  # type: ignore[no-any-return]  # modules return Any
