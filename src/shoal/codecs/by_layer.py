"""A codec for each layer, chosen by role and size: small or delicate layers can be sent exactly.

Layers with the same codec form a group, which the codec sees as one vector. The payloads of all groups are
sent as two bodies. The first is a table with four pairs of numbers for each payload: the dtype of a tensor,
as its index in `DTYPES`, and its elements; -1 and 0 if the payload has fewer tensors. The second holds the
bytes of all tensors, each padded to a multiple of 8 so that the next is aligned for any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.wire import seal, unseal
from shoal.core.codec import FEEDBACK, Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.seeds import derive
from shoal.core.transport import DTYPES, MOST_PARTS
from shoal.core.vector import Piece

NONE = (-1, 0)  # a pair in the table that stands for no tensor


@dataclass(frozen=True)
class ByLayer(Codec):
    """Chooses a codec for each parameter; all parameters with the same codec are one vector to it.

    Codecs are words, with '/' between their options: 'top_k:density=0.01/feedback=none'. In Python, a rule
    may choose instead: it maps a piece (its name, shape and kind) to such a word, or to a codec. If the
    layers are not known, the length of the vector decides.
    """

    code: ClassVar[int] = 15

    large: str = "one_bit"  # for parameters of at least `limit` elements
    small: str = "none"
    limit: int = 4096
    bias: str = "none"  # for biases of any size
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
    """The codec of a word; raises ValueError for one that cannot be used for some layers only."""
    from shoal.codecs import CODECS  # here: the catalogue has this module's codec too

    codec = CODECS.read(word.replace("/", ",")) if isinstance(word, str) else word
    if codec.for_gradients or codec.needs_products or codec.needs_all:
        raise ValueError(
            f"{codec} does more than compress a vector, and cannot do that for some layers only; "
            "take it for the whole model, or another codec here, such as top_k"
        )
    return codec


@dataclass(frozen=True)
class LayerGroup:
    """A codec and its stretches of the vector, which are one vector to it."""

    codec: Codec
    places: tuple[tuple[int, int], ...]  # begin and end of each stretch

    def of(self, v: Tensor) -> Tensor:
        """This group's elements of `v`: a view of a single stretch, else a copy."""
        stretches = [v[begin:end] for begin, end in self.places]
        return stretches[0] if len(stretches) == 1 else torch.cat(stretches)

    def give(self, part: Tensor, out: Tensor) -> None:
        """Write this group's elements into their places in `out`."""
        sizes = [end - begin for begin, end in self.places]
        for stretch, (begin, end) in zip(torch.split(part, sizes), self.places, strict=True):
            if stretch.data_ptr() != out[begin:end].data_ptr():
                out[begin:end] = stretch


def _group(codec: Codec, pieces: list[Piece]) -> LayerGroup:
    ends = list(accumulate(piece.end - piece.begin for piece in pieces))
    moved = [replace(p, begin=end - p.end + p.begin, end=end) for p, end in zip(pieces, ends, strict=True)]
    places: list[tuple[int, int]] = []
    for p in pieces:
        begin = places.pop()[0] if places and places[-1][1] == p.begin else p.begin
        places.append((begin, p.end))
    return LayerGroup(codec.fit(moved), tuple(places))


@dataclass(frozen=True)
class Layered(Codec):
    """Encodes each group with its own codec and state; each has the error feedback that it has alone."""

    code: ClassVar[int] = ByLayer.code

    groups: tuple[LayerGroup, ...]

    @property
    def feedback(self) -> str:
        return strongest(group.codec for group in self.groups)

    @property
    def merged(self) -> Codec:
        return Layered(tuple(replace(group, codec=group.codec.merged) for group in self.groups))

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
            if rest is None or group.codec.feedback == "none":
                payload, inner = group.codec.encode(group.of(v), inner)
            else:
                residual = group.of(rest)
                payload, inner = group.codec.encode_rest(group.of(v), residual, inner)
                group.give(residual, rest)
            payloads.append(payload)
            after.update({f"{i}.{name}": value for name, value in inner.items()})
        table, written = join(payloads, v.device)
        return seal(self.code, v.numel(), written.numel(), table, written), after


@dataclass(frozen=True)
class ByLength(Codec):
    """For vectors of unknown layers: one codec from `limit` elements on, another for shorter vectors."""

    code: ClassVar[int] = ByLayer.code

    large: Codec
    small: Codec
    limit: int
    merging: bool = False  # whether this is the codec for averages

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
        whole = Layered((LayerGroup(codec.fit(()), ((0, v.numel()),)),))
        return whole.merged if self.merging else whole


def strongest(codecs: Iterable[Codec]) -> str:
    """The strongest error feedback that any of these codecs asks for."""
    return max((codec.feedback for codec in codecs), key=FEEDBACK.index, default="none")


def join(payloads: Sequence[Payload], device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the bytes of these payloads."""
    parts = [part for payload in payloads for part in payload]
    rows = [[(DTYPES.index(part.dtype), part.numel()) for part in payload] for payload in payloads]
    table = torch.tensor([row + [NONE] * (MOST_PARTS - len(row)) for row in rows], dtype=torch.int64)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return table.flatten(), torch.cat([nothing, *(_padded(part).to(device) for part in parts)])


def split(table: Tensor, written: Tensor) -> list[Payload]:
    """The payloads of a table and its bytes; raises WireError if the table does not describe the bytes."""
    if written.data_ptr() % 8 or written.storage_offset() % 8:
        written = written.clone()
    payloads, at = [], 0
    for row in table.view(-1, MOST_PARTS, 2).tolist():
        payload: list[Tensor] = []
        for dtype, elements in _tensors(row):
            nbytes = elements * dtype.itemsize
            if at + nbytes > written.numel():
                raise WireError(f"a table describes more than the {written.numel()} bytes that came with it")
            payload.append(written[at : at + nbytes].view(dtype))
            at += -(-nbytes // 8) * 8
        payloads.append(tuple(payload))
    if at != written.numel():
        raise WireError(f"a table describes {at} bytes, but {written.numel()} came with it")
    return payloads


def _tensors(row: list[list[int]]) -> Iterator[tuple[torch.dtype, int]]:
    told = [tuple(pair) for pair in row]
    while told and told[-1] == NONE:
        told.pop()
    for place, elements in told:
        if not (0 <= place < len(DTYPES) and elements >= 0):
            raise WireError(f"a table describes {elements} elements of dtype number {place}")
        yield DTYPES[place], elements


def _padded(part: Tensor) -> Tensor:
    if not part.numel():  # an empty tensor cannot be viewed as bytes
        return torch.empty(0, dtype=torch.uint8)
    raw = part.contiguous().flatten().view(torch.uint8)
    return pad(raw, (0, -raw.numel() % 8))
