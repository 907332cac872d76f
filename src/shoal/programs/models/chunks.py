"""Context-sensitive chunks: long sequences cut up for bidirectional models (Chen, Yan & Huo 2015).

"21-64+21" cuts a sequence into cores of 64 frames, each read with 21 frames of context before and after it.
Both directions of the model read the whole chunk from zero state; only the core has labels, or is decoded.
Chunks are short and of similar length, so a batch of the same number of frames takes fewer time steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shoal.core.task import UNLABELLED
from shoal.programs.models.padding import unpad

AT_ONCE = 256  # chunks decoded together: more take more memory and no less time

Acoustic = Callable[[Tensor, Tensor], Tensor]
"""A model that maps (sequences, frames, inputs) and lengths to logits."""


@dataclass(frozen=True)
class Span:
    """A chunk of a sequence: frames `begin` to `end`, with `first` to `last` as its core."""

    begin: int
    first: int
    last: int
    end: int


@dataclass(frozen=True)
class Chunks:
    """How to cut sequences: the number of frames of left context, core and right context."""

    left: int
    core: int
    right: int

    def __post_init__(self) -> None:
        if self.core < 1 or self.left < 0 or self.right < 0:
            raise ValueError(f"chunks {self}: the core must be at least 1, both contexts at least 0")

    @classmethod
    def parse(cls, text: str) -> Chunks:
        """Read the notation of the paper, such as "21-64+21"."""
        sizes = re.fullmatch(r"(\d+)-(\d+)\+(\d+)", text, re.ASCII)
        if not sizes:
            raise ValueError(f"chunks {text!r}: write left-core+right, such as '21-64+21'")
        return cls(*map(int, sizes.groups()))

    def __str__(self) -> str:
        return f"{self.left}-{self.core}+{self.right}"

    def cut(self, length: int, hop: int | None = None) -> list[Span]:
        """The chunks of a sequence. Contexts are clipped at its ends, and the last core may be shorter.

        A core begins every `hop` frames, by default where the previous one ends.
        """
        hop = self.core if hop is None else hop
        if not 1 <= hop <= self.core:
            raise ValueError(f"hop={hop} would skip frames or never advance; take 1 to {self.core}")
        firsts = range(0, max(1, length - self.core + hop), hop) if length else ()
        lasts = [min(first + self.core, length) for first in firsts]
        return [
            Span(max(0, first - self.left), first, last, min(length, last + self.right))
            for first, last in zip(firsts, lasts, strict=True)
        ]

    def samples(
        self, sequences: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The chunks of all sequences and their labels; context is UNLABELLED."""
        frames, targets = [], []
        for x, y in zip(sequences, labels, strict=True):
            for span in self.cut(len(x)):
                target = torch.full((span.end - span.begin,), UNLABELLED, dtype=y.dtype)
                target[span.first - span.begin : span.last - span.begin] = y[span.first : span.last]
                frames.append(x[span.begin : span.end])
                targets.append(target)
        return frames, targets


def decode(model: Acoustic, frames: Tensor, lengths: Tensor, chunks: Chunks, hop: int) -> Tensor:
    """Log posteriors of every frame of padded sequences, read in chunks.

    Cores overlap if `hop` is less than the core; posteriors are averaged there. Padded frames get zeros.
    """
    cuts = [(row, span) for row, length in enumerate(lengths.tolist()) for span in chunks.cut(length, hop)]
    cores = [core for at in range(0, len(cuts), AT_ONCE) for core in read(model, frames, cuts[at:][:AT_ONCE])]
    total = frames.new_zeros(*frames.shape[:2], cores[0].shape[1])
    times = frames.new_zeros(*frames.shape[:2], 1)
    for (row, span), core in zip(cuts, cores, strict=True):
        total[row, span.first : span.last] += core
        times[row, span.first : span.last] += 1
    least = torch.finfo(total.dtype).tiny  # a posterior that underflows must not make the loss infinite
    return torch.where(times > 0, total / times, 1.0).clamp(min=least).log()


def read(model: Acoustic, frames: Tensor, cuts: Sequence[tuple[int, Span]]) -> Iterator[Tensor]:
    """The posteriors in the core of each chunk, given by a row of `frames` and a span."""
    x = pad_sequence([frames[row, span.begin : span.end] for row, span in cuts], batch_first=True)
    logits = model(x, torch.tensor([span.end - span.begin for _, span in cuts]))
    for (_, span), found in zip(cuts, logits.softmax(dim=-1), strict=True):
        yield found[span.first - span.begin : span.last - span.begin]


class InChunks(nn.Module):
    """In training, maps padded chunks to logits; in evaluation, decodes sequences in overlapping chunks.

    Evaluation returns log posteriors, which cross-entropy accepts as logits.
    """

    def __init__(self, model: nn.Module, chunks: Chunks, hop: int) -> None:
        super().__init__()
        self.model = model
        self.chunks = chunks
        self.hop = hop

    def forward(self, x: Tensor) -> Tensor:
        frames, lengths = unpad(x)
        if self.training:
            return self.model(frames, lengths)  # type: ignore[no-any-return]  # modules return Any
        return decode(self.model, frames, lengths, self.chunks, self.hop)
