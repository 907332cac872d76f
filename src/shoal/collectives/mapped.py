"""Averaging in mapped memory: every worker averages one stripe, straight from the vectors of the others.

The workers of one host map each other's memory once. For an average each copies its vector into its own
memory, and all meet; each averages its stripe of all vectors, and all meet again; each copies the stripes
together. A worker writes n (1 + 1/P) bytes for others to read and sends 2 log2 P short messages, where
`stripes` writes 2 n (P-1)/P and sends 2 (P-1). It adds what `stripes` adds, in the same order: the bits are
the same.

Nobody waits for the slowest reader. A worker writes its next vector after the second meeting: by then all
have read the last one. It writes its next stripe after the first meeting of the next average: by then all
have copied the last one. When workers come or go in between, a new epoch begins with a roll call, and whoever
answers has stopped reading. One who is not in that epoch finds that what it read was revised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shoal.collectives.stripes import Striped, cut
from shoal.collectives.stripes import stripes as by_messages
from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.core.transport import DTYPES, Message, Shows
from shoal.engine.group import Group, Mean

SMALLEST_MAPPED = 64 * 1024
"""Vectors of fewer bytes are averaged by messages."""

WIDEST_BYTES = max(dtype.itemsize for dtype in DTYPES)
"""Of an element: stripes differ by one."""

_HEAD_BYTES = 64
"""Before each vector: its weight, its length and the code of its dtype. The rest aligns it."""

_VECTOR, _STRIPE = "mapped vector", "mapped stripe"


class Mapped:
    """Averages in mapped memory. Each worker needs its own object.

    Vectors that are too small, or larger than the model, are averaged as `otherwise` does. So are all unless
    all workers can map each other's memory; if that is `required`, Unavailable is raised.
    """

    def __init__(self, otherwise: Mean = by_messages, *, required: bool = False) -> None:
        self._otherwise = otherwise
        self._required = required
        self._vector = self._stripe = torch.empty(0, dtype=torch.uint8)  # this worker's memory

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        if not SMALLEST_MAPPED <= v.nbytes <= group.x.nbytes:
            return await self._otherwise(group, v, weight)
        if "mapped" not in group.measured:
            group.measured["mapped"] = await self._map(group)
        memory: MappedMemory | None = group.measured["mapped"]
        if memory is None:
            return await self._otherwise(group, v, weight)
        return await memory.average(group, v, weight)

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average in the background: in stripes, since several may be under way."""
        return await by_messages.start(group, v, weight, number, key)

    async def _map(self, group: Group) -> MappedMemory | None:
        """Show this worker's memory to the others and map theirs; None unless all of them can do so."""
        if not await meet(group, self._has_memory(group)):
            self._vector = self._stripe = torch.empty(0, dtype=torch.uint8)
            if self._required:
                raise Unavailable(
                    "collective 'mapped' needs workers on one host that share memory; take 'stripes'"
                )
            return None
        for rank in group.others:
            await group.show(rank, Message(_VECTOR, (self._vector,)))
            await group.show(rank, Message(_STRIPE, (self._stripe,)))
        vectors = {rank: MappedBlock.of(await group.take(_VECTOR, rank)) for rank in group.others}
        stripes = {rank: MappedBlock.of(await group.take(_STRIPE, rank)) for rank in group.others}
        vectors[group.rank], stripes[group.rank] = MappedBlock(self._vector), MappedBlock(self._stripe)
        ranks = range(group.size)
        return MappedMemory(group.rank, [vectors[k] for k in ranks], [stripes[k] for k in ranks])

    def _has_memory(self, group: Group) -> bool:
        """Whether this worker has memory for its vector and its stripe, which all others can map."""
        if not group.can_show() or group.x.device.type != "cpu":
            return False
        share, room = cast(Shows, group.transport).share, group.x.nbytes
        stripe = -(-room // group.size) + WIDEST_BYTES
        try:
            if self._vector.nbytes < _HEAD_BYTES + room:
                self._vector = share(torch.zeros(_HEAD_BYTES + room, dtype=torch.uint8))
            if self._stripe.nbytes < stripe:
                self._stripe = share(torch.zeros(stripe, dtype=torch.uint8))
        except Unavailable:  # the system has not enough
            return False
        return True


async def meet(group: Group, agrees: bool = True) -> bool:
    """Return when all workers have come; whether all agree. In log2 P rounds, with one message in each.

    In round k a worker hears from the one 2^k before it of all that have come to that one: dissemination.
    """
    distance = 1
    while distance < group.size:
        after, before = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        await group.send(after, Message("meets", count=float(agrees)))
        agrees = bool((await group.take("meets", before)).count) and agrees
        distance *= 2
    return agrees


@dataclass(frozen=True)
class MappedBlock:
    """Memory of one worker, as all map it. After a read, `is_consistent` says whether it may be used."""

    memory: Tensor
    is_consistent: Callable[[], bool] = lambda: True

    @classmethod
    def of(cls, m: Message) -> MappedBlock:
        """What a worker shows."""
        assert m.release is not None
        return cls(m.body, m.release)


class MappedMemory:
    """The memory of all workers of a group, in the order of their ranks, and averages in it."""

    def __init__(self, rank: int, vectors: Sequence[MappedBlock], stripes: Sequence[MappedBlock]) -> None:
        self._rank, self._vectors, self._stripes = rank, vectors, stripes
        self._heads = [block.memory[:24].view(torch.float64) for block in vectors]
        self._views: dict[tuple[torch.dtype, int], Views] = {}

    async def average(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        revise = cast(Shows, group.transport).revise
        views = self._views_for(v)
        revise(self._vectors[self._rank].memory)
        self._heads[self._rank].copy_(torch.tensor([weight, *_shape(v)], dtype=torch.float64))
        views.own.copy_(v)
        await meet(group)
        weights = self._weights(v)
        revise(self._stripes[self._rank].memory)
        views.merge(weights)
        self._check(self._vectors)
        await meet(group)
        average = torch.cat(views.stripes)
        self._check(self._stripes)
        sent = v.nbytes + (group.size - 2) * views.stripes[self._rank].nbytes
        group.meter.bytes_sent += sent
        group.meter.bytes_received += sent
        return average, sum(weights)

    def _views_for(self, v: Tensor) -> Views:
        key = v.dtype, v.numel()
        if key not in self._views:
            vectors = [block.memory[_HEAD_BYTES:] for block in self._vectors]
            stripes = [block.memory for block in self._stripes]
            self._views[key] = Views(self._rank, *key, vectors, stripes)
        return self._views[key]

    def _weights(self, v: Tensor) -> list[float]:
        """The weight of each worker. Raises WireError if one has brought another kind of vector."""
        heads = [head.tolist() for head in self._heads]
        for rank, (_, *shape) in enumerate(heads):
            if shape != _shape(v):
                theirs = f"{shape[0]:.0f} x {DTYPES[int(shape[1])]}"
                raise WireError(f"member {rank} averages {theirs}, where {v.numel()} x {v.dtype} is expected")
        return [weight for weight, *_ in heads]

    def _check(self, blocks: Sequence[MappedBlock]) -> None:
        """Raise PeerLost if the owner of a block has changed it before it was read to the end."""
        for rank, block in enumerate(blocks):
            if not block.is_consistent():
                raise PeerLost(f"member {rank} of the workers went on to another average without this one")


class Views:
    """The memory of all workers as vectors of one dtype and length, seen by one of them."""

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        elements: int,
        vectors: Sequence[Tensor],
        stripes: Sequence[Tensor],
    ) -> None:
        def view(memory: Tensor, elements: int) -> Tensor:
            return memory[: elements * dtype.itemsize].view(dtype)

        parts = cut(elements, len(vectors))
        self.own = view(vectors[rank], elements)  # this worker's vector
        self.stripes = [view(s, part.stop - part.start) for s, part in zip(stripes, parts, strict=True)]
        self._stripe = self.stripes[rank]  # of this worker
        self._given = [view(vector, elements)[parts[rank]] for vector in vectors]

    def merge(self, weights: Sequence[float]) -> None:
        """Average this worker's stripe of all vectors."""
        stripe, wide = self._stripe, torch.promote_types(self._stripe.dtype, torch.float32)
        acc = stripe.zero_() if wide == stripe.dtype else torch.zeros_like(stripe, dtype=wide)
        for given, weight in zip(self._given, weights, strict=True):  # rank order, as in stripes
            acc.add_(given, alpha=weight)
        total = sum(weights)
        if total:
            acc.div_(total)
        if acc is not stripe:
            stripe.copy_(acc)


def _shape(v: Tensor) -> list[float]:
    return [float(v.numel()), float(DTYPES.index(v.dtype))]
