"""Tiny Shakespeare: predict each next character in a million characters of his plays (Karpathy 2015)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task, sequence_loss
from shoal.programs.models.language import Sizes
from shoal.programs.tasks.data import Dataset, read

TINYSHAKESPEARE = Dataset(
    name="tinyshakespeare",
    files={"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    urls=(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
        "/data/tinyshakespeare/",
    ),
)

CONTEXT = 64  # characters in a sample
TRAINING = 0.9  # share of the text; the end of it is the test set


def shakespeare(layers: int = 2, width: int = 32, heads: int = 2) -> Task:
    """A small transformer that predicts the next character of Shakespeare's plays."""
    return Task(
        name="shakespeare",
        model=Sizes(width=width, heads=heads, layers=layers),
        data=shakespeare_data,
        loss=sequence_loss,
        optimizer=adamw,
        lr=0.003,
        batch=16,
        metrics={"bits a character": bits},
        about="the next character of Shakespeare (tinyshakespeare), 64 at a time; transformer, AdamW",
    )


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW with torch's defaults; fused, because with such small tensors the calls cost most."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def shakespeare_data() -> Data:
    """Sequences of 64 characters, labelled with the next character of each; nine tenths are for training."""
    codes = encode(bytes(read(TINYSHAKESPEARE)["input.txt"]))
    cut = int(TRAINING * len(codes))
    return Data(*sequences(codes[:cut], CONTEXT), *sequences(codes[cut:], CONTEXT))


def encode(text: bytes) -> Tensor:
    """Number the characters that occur in a text from 0, in the order of their codes."""
    codes: Tensor
    _, codes = torch.unique(torch.frombuffer(bytearray(text), dtype=torch.uint8), return_inverse=True)
    return codes


def sequences(codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut a text into inputs of `length` without overlap, and labels one character later; drops the rest."""
    pieces = (len(codes) - 1) // length
    x, y = codes[:-1], codes[1:]
    return x[: pieces * length].view(pieces, length), y[: pieces * length].view(pieces, length)


def bits(out: Tensor, y: Tensor) -> float:
    """Cross-entropy in bits per character."""
    return float(sequence_loss(out, y)) / math.log(2)
