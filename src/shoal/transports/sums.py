"""Sums: one worker's part in all-reduces that may begin while their vectors are still being computed."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.transport import DTYPES
from shoal.transports.agreement import GRACE_SECONDS, Agreement, Signature

Span = tuple[int, int]
"""Where a part begins, and where it ends."""


class Sums(ABC):
    """One vector after the other, each of them part by part, on whatever adds them up."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._under_way: PartedSum | None = None
        self._closed = False
        self._held: list[PartedSum] = []  # those that failed: their memory may still be written to
        self._shape: tuple[Sequence[slice], Any, list[Span], Signature] | None = None  # of the last sum

    def sum(self, v: Tensor, seconds: float) -> int:
        """Sum `v` over the workers, in place; the bytes this node sent, as a ring algorithm would."""
        flat = v.detach().reshape(-1)  # shares the memory of v where it can
        sent = self.begin(flat, [slice(None)], seconds).complete()
        if flat.data_ptr() != v.data_ptr():
            v.detach().copy_(flat.view(v.shape))
        return sent

    def begin(self, v: Tensor, parts: Sequence[slice], seconds: float) -> PartedSum:
        """A sum of which no part has started yet."""
        if v.dtype not in DTYPES:
            raise ValueError(f"all_reduce cannot sum {v.dtype}; use one of {', '.join(map(str, DTYPES))}")
        spans, signature = self._shape_of(v, parts)
        if self._under_way is not None:
            raise ValueError(
                f"all_reduce {self.agreement.here.number} was begun and is not finished: await its finish() "
                "before the next"
            )
        deadline = time.monotonic() + seconds
        if self.agreement.workers > 1:
            self.agreement.reach(signature, deadline)
        self._under_way = PartedSum(self, v.detach(), spans, deadline, seconds)
        return self._under_way

    def _shape_of(self, v: Tensor, parts: Sequence[slice]) -> tuple[list[Span], Signature]:
        """Where the parts are, checked, and how the others are told; worked out once for the same list."""
        if self._shape is None or self._shape[0] is not parts or self._shape[1] != (v.shape, v.dtype):
            spans = _spans(v, parts)
            self._shape = parts, (v.shape, v.dtype), spans, _signature(v, spans)
        return self._shape[2], self._shape[3]

    def add(self, carried: Tensor) -> list[Any]:
        """Begin to sum a flat tensor that is where it can be summed, in place; what to wait for."""
        if self._closed:
            raise ValueError(
                f"node {self.agreement.rank} has closed its transport and cannot go on with a sum"
            )
        return self._post(carried) if self.agreement.workers > 1 and carried.numel() else []

    def settle(self, parted: PartedSum, works: list[Any], deadline: float) -> None:
        """Wait for what was begun. Raises PeerLost if it fails; its memory is held from then on."""
        if self._under_way is not parted:
            raise ValueError("this all_reduce was finished before, or its transport was closed")
        self._under_way = None
        self._held.append(parted)
        self._wait(works, deadline)
        self._held.remove(parted)

    def share_of(self, nbytes: int) -> int:
        """What a ring algorithm sends for so many bytes."""
        return 2 * (self.agreement.workers - 1) * nbytes // self.agreement.workers

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """What a dtype is summed in."""
        return dtype

    def carried(self, piece: Tensor) -> Tensor:
        """A part of a vector where it can be summed: itself in host memory, or a copy there."""
        return piece.to("cpu", self.travels_as(piece.dtype)).contiguous()

    def close(self) -> None:
        """Begin nothing more. What was begun and never finished is held, as what failed is."""
        self._closed = True
        if self._under_way is not None:
            self._held.append(self._under_way)
            self._under_way = None

    @abstractmethod
    def _post(self, carried: Tensor) -> list[Any]:
        """Begin to sum it; it has elements."""

    @abstractmethod
    def _wait(self, works: list[Any], deadline: float) -> None:
        """Wait until all is summed; raises the agreement's `failure` if that does not come about."""


class PartedSum:
    """A Reduction: parts go out as they start, and whoever finishes it waits for all of them."""

    def __init__(self, sums: Sums, v: Tensor, spans: list[Span], deadline: float, seconds: float) -> None:
        self._sums, self._v, self._spans = sums, v, spans
        self._deadline, self._seconds = deadline, seconds
        self._started = 0
        self._nbytes = 0
        self._works: list[Any] = []
        self._carried: list[
            tuple[Tensor, Tensor]
        ] = []  # each part, and what travels: one memory if it can be

    def start(self, part: int) -> None:
        """Part number `part` is ready. One that is not where it can be summed is copied there first."""
        if part != self._started or part >= len(self._spans):
            due = f"{self._started} is next" if self._started < len(self._spans) else "all have started"
            raise ValueError(f"parts start in order, each once: not part {part} of {len(self._spans)}, {due}")
        self._started += 1
        begin, end = self._spans[part]
        piece = self._v[begin:end]
        carried = self._sums.carried(piece)
        self._carried.append((piece, carried))
        self._nbytes += carried.nbytes
        self._works += self._sums.add(carried)

    async def finish(self) -> int:
        """Start the rest, wait until all is summed; the bytes this node sent, as a ring algorithm would."""
        return self.complete()

    def complete(self) -> int:
        """The same, outside a coroutine."""
        for part in range(self._started, len(self._spans)):
            self.start(part)
        # somebody computed for longer than the timeout: that alone is no reason to give up
        least = time.monotonic() + min(self._seconds, GRACE_SECONDS)
        self._sums.settle(self, self._works, max(self._deadline, least))
        for piece, carried in self._carried:
            if carried.data_ptr() != piece.data_ptr():
                piece.copy_(carried)
        self._works.clear()
        self._carried.clear()
        return self._sums.share_of(self._nbytes)


def _spans(v: Tensor, parts: Sequence[slice]) -> list[Span]:
    if v.dim() != 1:
        raise ValueError(f"only a flat vector has parts, not one of shape {tuple(v.shape)}")
    spans = [part.indices(len(v)) for part in parts]
    end = 0
    for first, last, step in sorted(spans):
        if step != 1 or first != end or last < first:
            raise ValueError(
                f"the parts of a sum must cover its {len(v)} elements without gaps or overlaps: what ends at "
                f"{end} is followed by [{first}:{last}:{step}]"
            )
        end = last
    if end != len(v):
        raise ValueError(f"the parts of a sum end at element {end} of {len(v)}: cover the vector")
    return [(first, last) for first, last, _ in spans]


def _signature(v: Tensor, spans: list[Span]) -> Signature:
    whole = f"{len(v)} x {str(v.dtype).removeprefix('torch.')}"
    if v.device.type != "cpu":
        whole += f" on {v.device.type}"
    if len(spans) == 1:
        return whole
    return f"{whole} in {len(spans)} parts ({hashlib.sha256(repr(spans).encode()).hexdigest()[:8]})"
