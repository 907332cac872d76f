"""Sequences of different lengths in one tensor, which carries the lengths with it.

A further channel behind the others is 1 where a sequence has a frame and 0 behind its end. So whole sequences
can be the samples of a task, and are shuffled, shared out and moved like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from shoal.core.task import UNLABELLED


def pad(sequences: Sequence[Tensor]) -> Tensor:
    """Sequences of (frames, channels) as (sequences, frames of the longest, channels + 1)."""
    return pad_sequence([F.pad(frames, (0, 1), value=1.0) for frames in sequences], batch_first=True)


def pad_labels(labels: Sequence[Tensor]) -> Tensor:
    """A label for every frame, as (sequences, frames of the longest); UNLABELLED behind the end."""
    return pad_sequence(list(labels), batch_first=True, padding_value=UNLABELLED)


def unpad(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `pad` was given as one tensor, without the further channel, and the lengths."""
    return x[..., :-1], x[..., -1].sum(dim=1).long()


class Padded(nn.Module):
    """A model that is called with frames and lengths, as one that takes what `pad` answers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(*unpad(x))  # type: ignore[no-any-return]  # modules answer Any
