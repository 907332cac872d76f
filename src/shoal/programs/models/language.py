"""A language model: a small decoder-only transformer (Vaswani et al. 2017; Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

SPREAD = 0.02  # standard deviation of initial embeddings: small, so that all symbols start equally likely


@dataclass(frozen=True)
class Sizes:
    """The sizes of a language model; the defaults are a small one for 65 characters."""

    symbols: int = 65
    context: int = 64  # longest sequence
    width: int = 32
    heads: int = 2
    layers: int = 2

    def __post_init__(self) -> None:
        for name in ("symbols", "context", "width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a language model needs at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} cannot be divided among heads={self.heads}; "
                f"take a multiple, such as {self.heads * max(1, round(self.width / self.heads))}"
            )

    def __call__(self) -> LanguageModel:
        """A model of these sizes; as the factory of a Task it compares equal to another of the same sizes."""
        return LanguageModel(self)


class LanguageModel(nn.Module):
    """Logits of the next symbol at every position of a sequence; attention is causal.

    The output layer shares its weights with the embedding. With the default sizes there are 29,600
    parameters.
    """

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.sizes = sizes = sizes or Sizes()
        self.embedding = nn.Embedding(sizes.symbols, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.context, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        nn.init.normal_(self.embedding.weight, std=SPREAD)
        nn.init.normal_(self.positions, std=SPREAD)

    def forward(self, symbols: Tensor) -> Tensor:
        """(batch, length) integers -> (batch, length, symbols) logits."""
        length = checked_length(symbols, self.sizes.context)
        places = self.embedding(symbols) + self.positions[:length]
        return F.linear(self.norm(self.blocks(places)), self.embedding.weight)


@fx.wrap  # torch.fx cannot trace through the comparison
def checked_length(symbols: Tensor, context: int) -> int:
    """The length of sequences. Raises ValueError if that is more than the context."""
    length = symbols.shape[-1]
    if length > context:
        raise ValueError(f"a sequence of {length} symbols is longer than the context of {context}")
    return length


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with layer normalisation and a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.questions = nn.Linear(width, 3 * width)  # queries, keys and values
        self.answers = nn.Linear(width, width)
        self.before_layer = nn.LayerNorm(width)
        self.layer = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        x = x + self.attend(self.before_attention(x))
        return cast(Tensor, x + self.layer(self.before_layer(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention of each position to itself and the ones before it."""
        apart = self.questions(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = apart.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.answers(seen.transpose(1, 2).flatten(2)))
