"""A codec for each layer, by its role and its size: what is small or delicate travels as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar

from torch import Tensor

from shoal.codecs.by_length import ByLength
from shoal.codecs.layered import Group, Layered
from shoal.core.codec import Codec, Payload, State
from shoal.core.vector import Piece


@dataclass(frozen=True)
class ByLayer(Codec):
    """Chooses a codec for each parameter; all parameters with the same codec are one vector to it.

    Codecs are words, with '/' between their options: 'top_k:density=0.01/feedback=none'. In Python, a rule
    may choose instead: from a piece (its name, shape and kind) it makes such a word, or a codec. Where no
    layer is known, the length of the vector decides.
    """

    code: ClassVar[int] = Layered.code

    large: str = "one_bit"  # for parameters of at least `limit` elements
    small: str = "none"
    limit: int = 4096
    bias: str = "none"  # for biases, however large
    rule: Callable[[Piece], str | Codec] | None = None

    def __post_init__(self) -> None:
        for word in (self.large, self.small, self.bias):
            chosen(word)
        if self.rule is not None and not callable(self.rule):
            raise ValueError(
                f"rule={self.rule!r} is not a function, and only Python has those; take large, small and bias"
            )

    @property
    def feedback(self) -> str:
        return self.fit(()).feedback

    @property
    def merged(self) -> Codec:
        return self.fit(()).merged

    def fit(self, pieces: Sequence[Piece]) -> Codec:
        if not pieces:
            return ByLength(chosen(self.large), chosen(self.small), self.limit)
        groups: dict[Codec, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(self._choose(piece), []).append(piece)
        return Layered(tuple(_group(codec, own) for codec, own in groups.items()))

    def init(self, like: Tensor, seed: int = 0) -> State:
        return self.fit(()).init(like, seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self.fit(()).encode(v, state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self.fit(()).encode_rest(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        return self.fit(()).decode(payload, out)

    def _choose(self, piece: Piece) -> Codec:
        if self.rule is not None:
            return chosen(self.rule(piece))
        if piece.kind == "bias":
            return chosen(self.bias)
        return chosen(self.large if prod(piece.shape) >= self.limit else self.small)


def chosen(word: str | Codec) -> Codec:
    """The codec that a word stands for; raises ValueError for one that must have all of a gradient."""
    from shoal.codecs import CODECS  # which has this file's own codec too

    codec = CODECS.read(word.replace("/", ",")) if isinstance(word, str) else word
    if codec.for_gradients or codec.for_averages or codec.needs_all:
        raise ValueError(
            f"{codec} does more than write gradients down, and would do it to some layers only; "
            "take it for all of them, or another codec here, as top_k"
        )
    return codec


def _group(codec: Codec, pieces: list[Piece]) -> Group:
    ends = list(accumulate(piece.end - piece.begin for piece in pieces))
    moved = [replace(p, begin=end - p.end + p.begin, end=end) for p, end in zip(pieces, ends, strict=True)]
    places: list[tuple[int, int]] = []
    for p in pieces:
        begin = places.pop()[0] if places and places[-1][1] == p.begin else p.begin
        places.append((begin, p.end))
    return Group(codec.fit(moved), tuple(places))
