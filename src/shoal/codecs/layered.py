"""Several codecs side by side: each has some stretches of the vector, and all they write travels as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.joined import join, split
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import FEEDBACK, Codec, Payload, State, expect
from shoal.core.seeds import derive
from shoal.core.transport import MOST_PARTS


@dataclass(frozen=True)
class Group:
    """A codec and its stretches of the vector, which are one vector to it."""

    codec: Codec
    places: tuple[tuple[int, int], ...]  # begin and end of each stretch

    def of(self, v: Tensor) -> Tensor:
        """What it has of `v`: a view if that is one stretch, else a copy."""
        stretches = [v[begin:end] for begin, end in self.places]
        return stretches[0] if len(stretches) == 1 else torch.cat(stretches)

    def give(self, part: Tensor, out: Tensor) -> None:
        """Put what it has into its places in `out`."""
        sizes = [end - begin for begin, end in self.places]
        for stretch, (begin, end) in zip(torch.split(part, sizes), self.places, strict=True):
            if stretch.data_ptr() != out[begin:end].data_ptr():
                out[begin:end] = stretch


@dataclass(frozen=True)
class Layered(Codec):
    """Writes each group with its own codec, in that codec's own state; each feeds back as it does alone."""

    code: ClassVar[int] = 15

    groups: tuple[Group, ...]
    merging: bool = False  # whether these are the codecs of whoever merges

    @property
    def feedback(self) -> str:
        return strongest(group.codec for group in self.groups)

    @property
    def merged(self) -> Codec:
        groups = tuple(replace(group, codec=group.codec.merged) for group in self.groups)
        return replace(self, groups=groups, merging=True)

    def init(self, like: Tensor, seed: int = 0) -> State:
        inner = (group.codec.init(group.of(like), derive(seed, i)) for i, group in enumerate(self.groups))
        return {f"{i}.{name}": value for i, state in enumerate(inner) for name, value in state.items()}

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._encode(v, None, state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._encode(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        nbytes, bodies = unseal(payload, self.code, out.numel())
        parts = (torch.int64, 2 * MOST_PARTS * len(self.groups)), (torch.uint8, nbytes)
        for group, inner in zip(self.groups, split(*expect(bodies, *parts)), strict=True):
            group.give(group.codec.decode(inner, group.of(out)), out)
        return out

    def _encode(self, v: Tensor, rest: Tensor | None, state: State) -> tuple[Payload, State]:
        payloads, after = [], {}
        for i, group in enumerate(self.groups):
            inner = {name.partition(".")[2]: t for name, t in state.items() if name.startswith(f"{i}.")}
            if rest is None or not self._feeds(group.codec):
                payload, inner = group.codec.encode(group.of(v), inner)
            else:
                lacks = group.of(rest)
                payload, inner = group.codec.encode_rest(group.of(v), lacks, inner)
                group.give(lacks, rest)
            payloads.append(payload)
            after.update({f"{i}.{name}": value for name, value in inner.items()})
        table, written = join(payloads, v.device)
        return seal(self.code, v.numel(), written.numel(), table, written), after

    def _feeds(self, codec: Codec) -> bool:
        return codec.feedback == "double" or (codec.feedback == "residual" and not self.merging)


def strongest(codecs: Iterable[Codec]) -> str:
    """The feedback that keeps all that any of these codecs wants kept."""
    return max((codec.feedback for codec in codecs), key=FEEDBACK.index, default="none")
