"""comm_hook: a codec in torch's DistributedDataParallel, without the rest of Shoal.

DDP hands over its gradients in buckets, one after the other and in the same order at every rank. The codec
keeps a state for each bucket. Single and half precision take one all-reduce, and a codec that averages in
flight takes the reductions that it asks for. For any other codec an all-gather distributes the payloads, and
every rank decodes all of them, in rank order.
"""

# No `from __future__ import annotations` here: torch checks a hook's annotations, which must be classes.

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import inf, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch.futures import Future

from shoal.codecs import CODECS
from shoal.core.averaging import Given
from shoal.core.codec import Codec, Payload, State
from shoal.core.seeds import derive
from shoal.core.transport import DTYPES, MOST_PARTS
from shoal.core.vector import Piece
from shoal.launch.drive import drive

ALIGNED = 8
"""Alignment in bytes of each part of a gathered payload, so that it can be read in place."""

Hook: TypeAlias = Callable[[Any, Any], Future[Tensor]]

Group: TypeAlias = "distributed.ProcessGroup | None"
"""None is the default process group."""


def comm_hook(codec: Codec | str, **options: Any) -> Hook:
    """Return a DDP communication hook that averages gradients with this codec.

    `codec` is a name from `shoal list codecs`, with its options here or in the name ("low_rank:rank=4"), or a
    codec object. Use it as `model.register_comm_hook(None, shoal.comm_hook("low_rank", rank=4))`; pass the
    process group instead of None if it is not the default. All ranks get the same bits. The hook holds the
    codec's state, so every model needs its own.
    """
    if options and not isinstance(codec, str):
        raise TypeError(
            f"{codec} has its options already; pass {', '.join(options)} only with the name of a codec"
        )
    if isinstance(codec, str):
        codec = CODECS.make(codec, **options) if options else CODECS.read(codec)
    if codec.needs_products:
        raise ValueError(
            f"{codec} needs the factors of each layer's gradient, and DDP hands over gradients alone; "
            "take 'low_rank', or DDP without a codec"
        )
    streams: dict[int, Stream] = {}

    def shoal_hook(state: Any, bucket: distributed.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        group, parameters = group_of(state), bucket.parameters()
        stream = streams.get(bucket.index())
        if stream is None or stream.addresses != addresses(parameters):  # DDP rebuilds its buckets
            stream = streams[bucket.index()] = Stream.begin(codec, parameters, bucket.index(), group)
        return stream.average(bucket.buffer(), group)

    return shoal_hook


def group_of(state: Any) -> Group:
    """The process group that was registered with the hook. Raises TypeError for anything else."""
    if state is None or isinstance(state, distributed.ProcessGroup):
        return state
    raise TypeError(
        f"register_comm_hook was given {state!r} as state; shoal.comm_hook takes None or a process group"
    )


def addresses(parameters: list[Tensor]) -> list[int]:
    """The memory addresses of parameters, which identify them."""
    return [p.data_ptr() for p in parameters]


def pieces_of(parameters: list[Tensor]) -> list[Piece]:
    """The layout of a bucket's parameters. They are numbered, because DDP does not give their names."""
    ends = accumulate(p.numel() for p in parameters)
    return [
        Piece(f"parameter {number}", p.shape, end - p.numel(), end, whole=True)
        for number, (p, end) in enumerate(zip(parameters, ends, strict=True))
    ]


@dataclass
class Stream:
    """The gradients of one bucket, with their codec and its state."""

    codec: Codec
    addresses: list[int]
    seed: int
    state: State | None = None
    rest: Tensor | None = None  # the compression error, under error feedback

    @classmethod
    def begin(cls, codec: Codec, parameters: list[Tensor], index: int, group: Group) -> "Stream":
        """Make the stream of a bucket with these parameters."""
        seed = derive(0, "ddp", distributed.get_rank(group), index)
        return cls(codec.fit(pieces_of(parameters)), addresses(parameters), seed)

    def average(self, bucket: Tensor, group: Group) -> Future[Tensor]:
        """Replace the bucket by its mean over all ranks."""
        codec = self.codec
        if codec.exact:
            return summed(bucket, group, bucket.dtype)
        if codec.in_flight:
            workers = _Ranks(group, bucket.device)
            average, self.state = drive(codec.average(bucket, self._begun(bucket), workers))
            return completed(bucket.copy_(average))
        if codec.cast is not None:  # values out of range become infinite, which a gradient scaler detects
            return summed(bucket, group, codec.cast)
        return self._gather(bucket, group)

    def _gather(self, bucket: Tensor, group: Group) -> Future[Tensor]:
        payloads = gathered(self._encode(bucket), bucket.device, group)
        out = torch.empty_like(bucket)
        total = torch.zeros_like(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
        for payload in payloads:  # rank order, so that all ranks round alike
            total.add_(self.codec.decode(payload, out))
        if not total.isfinite().all():  # an overflow of loss scaling must not stay in the codec's state
            self.state = self.rest = None
        return completed(bucket.copy_(total.div_(len(payloads))))

    def _begun(self, v: Tensor) -> State:
        return self.codec.init(v, self.seed) if self.state is None else self.state

    def _encode(self, v: Tensor) -> Payload:
        state = self._begun(v)
        if self.codec.feedback == "none":
            payload, self.state = self.codec.encode(v, state)
        else:
            self.rest = torch.zeros_like(v) if self.rest is None else self.rest
            payload, self.state = self.codec.encode_rest(v, self.rest, state)
        return payload


class _Ranks:
    """The reductions of a codec that averages in flight, over a process group. All ranks weigh the same."""

    weight, gives, records = 1.0, True, None

    def __init__(self, group: Group, device: torch.device) -> None:
        self.size = distributed.get_world_size(group)
        self.total = float(self.size)
        self._group, self._device = group, device
        self._given: dict[str, deque[Payload]] = defaultdict(deque)

    async def mean(self, v: Tensor) -> Tensor:
        """The mean by one all-reduce. Divides first, as DDP does."""
        average = v.mul(1 / self.size)
        distributed.all_reduce(average, group=self._group)
        return average

    async def largest(self, v: Tensor) -> Tensor:
        """The element-wise maximum. NaN and inf both come out as NaN: a MAX reduction may ignore NaN."""
        most = v.masked_fill(v.isnan(), inf)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self._group)
        return most.masked_fill_(most == inf, nan)

    async def sum(self, v: Tensor) -> Tensor:
        """The sum by one all-reduce."""
        total = v.clone()
        distributed.all_reduce(total, group=self._group)
        return total

    async def give(self, tag: str, parts: Payload) -> None:
        """Keep `parts` for `take`, which sends them."""
        self._given[tag].append(parts)

    async def take(self, tag: str) -> list[Given]:
        """Gather the payloads that all ranks gave under this tag."""
        if not self._given[tag]:
            raise RuntimeError(f"nothing was given as {tag!r} in this average, so nothing can be taken")
        payloads = gathered(self._given[tag].popleft(), self._device, self._group)
        return [Given(parts, self.weight) for parts in payloads]


def summed(bucket: Tensor, group: Group, dtype: torch.dtype) -> Future[Tensor]:
    """Average the bucket over all ranks by one all-reduce in `dtype`. Returns the future of the bucket."""
    v = bucket.mul_(1 / distributed.get_world_size(group)).to(dtype)  # divides first, as DDP does
    sent: Future[Any] = distributed.all_reduce(v, group=group, async_op=True).get_future()
    return sent.then(lambda _: bucket if v is bucket else bucket.copy_(v))


def completed(bucket: Tensor) -> Future[Tensor]:
    """A future that already holds the bucket."""
    future: Future[Tensor] = Future(devices=[bucket.device] if bucket.is_cuda else None)
    future.set_result(bucket)
    return future


def gathered(payload: Payload, device: torch.device, group: Group) -> list[Payload]:
    """The payloads of all ranks, in rank order. Gathers their dtypes and lengths first, then their bytes."""
    about = torch.full((MOST_PARTS, 2), -1, dtype=torch.int64)
    for number, part in enumerate(payload):
        about[number] = torch.tensor((DTYPES.index(part.dtype), part.numel()))
    tables = [
        [(DTYPES[dtype], length) for dtype, length in table.tolist() if dtype >= 0]
        for table in all_gather(about.to(device), group)
    ]
    longest = max(sum(map(space, table)) for table in tables)
    parcel = torch.zeros(longest, dtype=torch.uint8, device=device)
    for place, part in zip(places(tables[distributed.get_rank(group)]), payload, strict=True):
        parcel[place] = part.contiguous().view(torch.uint8).to(device)
    return [
        tuple(raw[place].view(dtype) for place, (dtype, _) in zip(places(table), table, strict=True))
        for table, raw in zip(tables, all_gather(parcel, group), strict=True)
    ]


def all_gather(v: Tensor, group: Group) -> list[Tensor]:
    """The vectors of all ranks, in rank order. They must have the same length."""
    everybody = [torch.empty_like(v) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(everybody, v, group=group)
    return everybody


def space(part: tuple[torch.dtype, int]) -> int:
    """Bytes that a part occupies in a gathered payload, padding included."""
    dtype, length = part
    return -(-length * dtype.itemsize // ALIGNED) * ALIGNED


def places(table: list[tuple[torch.dtype, int]]) -> list[slice]:
    """The byte ranges of the parts in a gathered payload."""
    ends = accumulate(map(space, table))
    begins = [end - space(part) for end, part in zip(ends, table, strict=True)]
    return [
        slice(begin, begin + length * dtype.itemsize)
        for begin, (dtype, length) in zip(begins, table, strict=True)
    ]
