"""Several codecs side by side: each has some stretches of the vector, and all they write travels as one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.joined import join, split
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.coding import REST
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
    """Writes each group with its own codec, in that codec's own state and with its feedback."""

    code: ClassVar[int] = 15

    groups: tuple[Group, ...]
    merging: bool = False  # whether these are the codecs of whoever merges

    @property
    def merged(self) -> Codec:
        groups = tuple(replace(group, codec=group.codec.merged) for group in self.groups)
        return replace(self, groups=groups, merging=True)

    def init(self, like: Tensor, seed: int = 0) -> State:
        inner = (group.codec.init(group.of(like), derive(seed, i)) for i, group in enumerate(self.groups))
        return {f"{i}.{name}": value for i, state in enumerate(inner) for name, value in state.items()}

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        payloads, after = [], {}
        for i, group in enumerate(self.groups):
            before = {name.partition(".")[2]: t for name, t in state.items() if name.startswith(f"{i}.")}
            payload, inner = self._encode(group.codec, group.of(v), before)
            payloads.append(payload)
            after.update({f"{i}.{name}": value for name, value in inner.items()})
        table, written = join(payloads, v.device)
        return seal(self.code, v.numel(), written.numel(), table, written), after

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        nbytes, bodies = unseal(payload, self.code, out.numel())
        table, written = expect(
            bodies, (torch.int64, 2 * MOST_PARTS * len(self.groups)), (torch.uint8, nbytes)
        )
        for group, inner in zip(self.groups, split(table, written), strict=True):
            group.give(group.codec.decode(inner, group.of(out)), out)
        return out

    def _encode(self, codec: Codec, v: Tensor, state: State) -> tuple[Payload, State]:
        if codec.feedback == "none" or (codec.feedback == "residual" and self.merging):
            return codec.encode(v, state)
        rest = state.pop(REST) if REST in state else torch.zeros_like(v)
        payload, state = codec.encode_rest(v, rest, state)
        return payload, {**state, REST: rest}
