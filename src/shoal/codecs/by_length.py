"""One codec or another for a whole vector, by how long it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shoal.codecs.layered import Group, Layered, strongest
from shoal.core.codec import Codec, Payload, State


@dataclass(frozen=True)
class ByLength(Codec):
    """Writes a vector of at least `limit` elements with one codec, a shorter one with the other."""

    code: ClassVar[int] = Layered.code

    large: Codec
    small: Codec
    limit: int
    merging: bool = False

    @property
    def feedback(self) -> str:
        return strongest((self.large, self.small))

    @property
    def merged(self) -> Codec:
        return replace(self, merging=True)

    def init(self, like: Tensor, seed: int = 0) -> State:
        return self._fitted(like).init(like, seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._fitted(v).encode(v, state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._fitted(v).encode_rest(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        return self._fitted(out).decode(payload, out)

    def _fitted(self, v: Tensor) -> Codec:
        codec = self.large if v.numel() >= self.limit else self.small
        whole = Layered((Group(codec.fit(()), ((0, v.numel()),)),))
        return whole.merged if self.merging else whole
