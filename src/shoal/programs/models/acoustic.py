"""Acoustic models: classify each frame of speech from eleven frames (DNN) or a whole utterance (DBLSTM).

The two models of Chen & Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with
Intra-block Parallel Optimization and Blockwise Model-Update Filtering", 2016; their sizes are the defaults.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class DNN(nn.Sequential):
    """Linear layers with ReLU between them: spliced frames in, logits of the classes out."""

    def __init__(
        self, inputs: int = 52, context: int = 5, layers: int = 7, width: int = 2048, classes: int = 18_002
    ) -> None:
        check_sizes("DNN", inputs=inputs, layers=layers, width=width, classes=classes)
        if context < 0:
            raise ValueError(f"DNN(context={context}) is negative; 0 gives each frame no neighbours")
        widths = [inputs * (2 * context + 1), *[width] * layers]
        hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(width, classes))


class DBLSTM(nn.Module):
    """Deep bidirectional LSTM with `width` cells for each direction in each layer, and a linear output."""

    def __init__(self, inputs: int = 52, layers: int = 5, width: int = 256, classes: int = 9_304) -> None:
        check_sizes("DBLSTM", inputs=inputs, layers=layers, width=width, classes=classes)
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, num_layers=layers, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, classes)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The logits of (sequences, frames, inputs), each sequence read from zero state.

        With `lengths`, padding has no influence in either direction: not a bit of a sequence's own outputs
        depends on it, and outputs at padded frames are zero.
        """
        if lengths is None:
            return self.output(self.lstm(frames)[0])  # type: ignore[no-any-return]  # modules return Any
        longest = int(lengths.max())
        read = self.read_by_direction if frames.device.type == "cpu" else self.read_packed
        logits = read(frames[:, :longest], lengths)
        return F.pad(logits, (0, 0, 0, frames.shape[1] - longest))

    def read_packed(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """The logits of padded sequences by torch's packed sequences, which GPUs read in one kernel."""
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        logits = PackedSequence(
            self.output(hidden.data), hidden.batch_sizes, hidden.sorted_indices, hidden.unsorted_indices
        )
        return pad_packed_sequence(logits, batch_first=True)[0]

    def read_by_direction(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """The same, one direction at a time; the backward one reads each sequence reversed in place.

        Both directions thus reach the padding last. On a CPU, packed sequences of unequal lengths go through
        autograd step by step, which takes several times as long.
        """
        places = torch.arange(frames.shape[1])
        inside = places < lengths.cpu()[:, None]
        turned = torch.where(inside, lengths.cpu()[:, None] - 1 - places, places)[..., None]
        zero = frames.new_zeros(1, len(frames), self.lstm.hidden_size)
        weights = self.lstm.all_weights
        for ahead, back in zip(weights[::2], weights[1::2], strict=True):
            settings = (True, 1, 0.0, self.training, False, True)  # biases, one layer, ..., batch first
            reversed_frames = frames.gather(1, turned.expand_as(frames))
            forward = torch.lstm(frames, (zero, zero), tuple(ahead), *settings)[0]
            backward = torch.lstm(reversed_frames, (zero, zero), tuple(back), *settings)[0]
            frames = torch.cat([forward, backward.gather(1, turned.expand_as(backward))], dim=-1)
        return self.output(frames) * inside[..., None]  # type: ignore[no-any-return]


def splice(frames: Tensor, context: int) -> Tensor:
    """Join each frame of an utterance (frames, bands) with `context` frames before and after it.

    At both ends the outermost frame is repeated.
    """
    steps = torch.arange(-context, context + 1, device=frames.device)
    places = torch.arange(len(frames), device=frames.device)[:, None] + steps
    return frames[places.clamp(0, len(frames) - 1)].flatten(1)


def check_sizes(model: str, **sizes: int) -> None:
    """Raise ValueError for the first size that is not at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{model}({name}={size}) is too small; take at least 1")
