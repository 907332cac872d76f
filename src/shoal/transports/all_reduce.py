"""All-reduce: what gloo's and MPI's have in common. Vectors may be reduced part by part as they are computed.

The libraries hang or crash if workers pass different lengths, and do not say who is missing when one fails.
CollectiveSchedule does both, without a message in the usual case.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.transport import DTYPES

GRACE_SECONDS = 2.0
"""After a failed all-reduce, how long workers wait for a sign of the other survivors."""

Signature = str
"""Describes a worker's input in ascii, as in "1000 x float32"; equal for inputs that can be summed."""


def ring_bytes(nbytes: int, workers: int) -> int:
    """The bytes that each worker sends in a ring all-reduce of a vector of `nbytes`."""
    return 2 * (workers - 1) * nbytes // workers


@dataclass(frozen=True)
class Position:
    """How far a worker is: the number of its latest all-reduce, and the signature of its input."""

    number: int = 0
    signature: Signature = ""


class CollectiveSchedule(ABC):
    """One worker's position in the sequence of all-reduces, and who is missing when one fails.

    A worker expects the signature that followed its last one before. All workers have agreed so far, so all
    expect the same. One that has something else compares with the others, which do not answer, so nobody
    starts an all-reduce of a wrong length. A refused input leaves no trace but its number, or the workers
    would expect different things from then on. `gone` holds the workers that left or were lost; it may grow.
    """

    silent = "did not come in time"
    """How messages describe a worker that is not known to be gone and does not answer."""

    def __init__(self, rank: int, ranks: Sequence[int], gone: Set[int]) -> None:
        self.rank, self.ranks, self.gone = rank, ranks, gone
        self.place, self.workers = ranks.index(rank), len(ranks)
        self.here = Position()  # read by other threads: replaced, never mutated
        self._agreed: Signature | None = None
        self._successor: dict[Signature, Signature] = {}
        self._broken: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether an all-reduce has failed; every later one fails then."""
        return self._broken is not None

    def advance(self, signature: Signature, deadline: float) -> None:
        """Go on to the next all-reduce. Waits for the others only if `signature` is not the expected one.

        Raises ValueError if theirs differ, PeerLost if they do not come or an earlier all-reduce failed.
        """
        if self._broken is not None:
            raise PeerLost(self._broken)
        self.here = Position(self.here.number + 1, signature)
        if not self.expects(signature):
            self._refuse_mismatch(self._compare(deadline))
        if self._agreed is not None:
            self._successor[self._agreed] = signature
        self._agreed = signature

    def expects(self, signature: Signature) -> bool:
        """Whether the others have this, too, as far as is known without asking them."""
        return self._agreed is not None and self._successor.get(self._agreed, self._agreed) == signature

    def break_off(self, why: str) -> PeerLost:
        """The error for an all-reduce that cannot go on; it is that of every later one, too."""
        self._broken = why
        return PeerLost(why)

    def failure(self, deadline: float) -> PeerLost:
        """The error for a failed all-reduce, naming who is missing. Raises ValueError for a mismatch."""
        self._broken = failed = (
            f"all_reduce {self.here.number} of {self.here.signature} failed (I am worker {self.rank})"
        )
        found = {self.rank: self.here, **self._survivors(deadline)}
        self._refuse_mismatch(found)
        fates = ", ".join(self._fates(found)) or "all workers are alive, but one came late"
        return self.break_off(f"{failed}: {fates}")

    @abstractmethod
    def _compare(self, deadline: float) -> dict[int, Position]:
        """The positions of all workers at this all-reduce. Raises `failure` if not all come in time."""

    @abstractmethod
    def _survivors(self, deadline: float) -> dict[int, Position]:
        """The positions of the other workers after a failure; without those that do not answer."""

    def _fates(self, found: dict[int, Position]) -> Iterable[str]:
        for rank in self.ranks:
            if rank in found:
                if found[rank].number < self.here.number:
                    yield f"worker {rank} did not come in time"
            else:
                yield f"worker {rank} {'is gone' if rank in self.gone else self.silent}"

    def _refuse_mismatch(self, found: dict[int, Position]) -> None:
        number = self.here.number
        brought = {rank: there.signature for rank, there in found.items() if there.number == number}
        if len(set(brought.values())) > 1:
            listed = ", ".join(f"worker {rank} has {what}" for rank, what in sorted(brought.items()))
            raise ValueError(f"all_reduce {number} needs the same dtype and length from all: {listed}")


Span = tuple[int, int]
"""Begin and end of a part."""


class TransportAllReduce(ABC):
    """Reduces one vector at a time, part by part, with a library's asynchronous all-reduce."""

    def __init__(self, schedule: CollectiveSchedule) -> None:
        self.schedule = schedule
        self._under_way: PartwiseReduction | None = None
        self._closed = False
        self._held: list[PartwiseReduction] = []  # failed: the library may still write to their memory
        self._shape: tuple[Sequence[slice], Any, list[Span], Signature] | None = None  # of the last vector

    def sum(self, v: Tensor, seconds: float) -> int:
        """Sum `v` over the workers, in place; returns the bytes that a ring all-reduce sends."""
        flat = v.detach().reshape(-1)  # shares the memory of v where it can
        sent = self.begin(flat, [slice(None)], seconds).complete()
        if flat.data_ptr() != v.data_ptr():
            v.detach().copy_(flat.view(v.shape))
        return sent

    def begin(self, v: Tensor, parts: Sequence[slice], seconds: float) -> PartwiseReduction:
        """An all-reduce of which no part has started yet."""
        if v.dtype not in DTYPES:
            raise ValueError(f"all_reduce cannot sum {v.dtype}; use one of {', '.join(map(str, DTYPES))}")
        spans, signature = self.shape_of(v, parts)
        if self._under_way is not None:
            raise ValueError(
                f"all_reduce {self.schedule.here.number} has begun and is not finished: await its finish() "
                "before the next"
            )
        deadline = time.monotonic() + seconds
        if self.schedule.workers > 1:
            self.schedule.advance(signature, deadline)
        self._under_way = PartwiseReduction(self, v.detach(), spans, deadline, seconds)
        return self._under_way

    def shape_of(self, v: Tensor, parts: Sequence[slice]) -> tuple[list[Span], Signature]:
        """The parts, checked, and their signature; computed once for the same list."""
        if self._shape is None or self._shape[0] is not parts or self._shape[1] != (v.shape, v.dtype):
            spans = _spans(v, parts)
            self._shape = parts, (v.shape, v.dtype), spans, _signature(v, spans)
        return self._shape[2], self._shape[3]

    def post(self, staged: Tensor) -> list[Any]:
        """Start to sum a staged flat tensor in place; returns what to wait for."""
        if self._closed:
            raise ValueError(
                f"node {self.schedule.rank} has closed its transport and cannot continue an all-reduce"
            )
        return self._post(staged) if self.schedule.workers > 1 and staged.numel() else []

    def wait(self, parted: PartwiseReduction, works: list[Any], deadline: float) -> None:
        """Wait for the started parts. Raises PeerLost if one fails; its memory is kept alive from then on."""
        if self._under_way is not parted:
            raise ValueError("this all_reduce was finished before, or its transport was closed")
        self._under_way = None
        self._held.append(parted)
        self._wait(works, deadline)
        self._held.remove(parted)

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which `dtype` is summed."""
        return dtype

    def staged(self, piece: Tensor) -> Tensor:
        """`piece` in memory that the library can sum: itself if in host memory, else a copy there."""
        return piece.to("cpu", self.reduce_dtype(piece.dtype)).contiguous()

    def close(self) -> None:
        """Start nothing more. A reduction that was never finished is kept alive, as failed ones are."""
        self._closed = True
        if self._under_way is not None:
            self._held.append(self._under_way)
            self._under_way = None

    @abstractmethod
    def _post(self, staged: Tensor) -> list[Any]:
        """Start to sum a tensor that is not empty."""

    @abstractmethod
    def _wait(self, works: list[Any], deadline: float) -> None:
        """Wait until all parts are summed; raises the schedule's `failure` if one fails."""


class PartwiseReduction:
    """A Reduction: each part is sent as it starts; `finish` waits for all of them."""

    def __init__(
        self, all_reduce: TransportAllReduce, v: Tensor, spans: list[Span], deadline: float, seconds: float
    ) -> None:
        self._all_reduce, self._v, self._spans = all_reduce, v, spans
        self._deadline, self._seconds = deadline, seconds
        self._started = 0
        self._nbytes = 0
        self._works: list[Any] = []
        self._staged: list[tuple[Tensor, Tensor]] = []  # each part, and what is summed

    def start(self, part: int) -> None:
        """Start part number `part`; copies it first if the library cannot sum it in place."""
        if part != self._started or part >= len(self._spans):
            due = f"{self._started} is next" if self._started < len(self._spans) else "all have started"
            raise ValueError(f"parts start in order, each once: not part {part} of {len(self._spans)}, {due}")
        self._started += 1
        begin, end = self._spans[part]
        piece = self._v[begin:end]
        staged = self._all_reduce.staged(piece)
        self._staged.append((piece, staged))
        self._nbytes += staged.nbytes
        self._works += self._all_reduce.post(staged)

    async def finish(self) -> int:
        """Start the rest and wait until all is summed; returns the bytes that a ring all-reduce sends."""
        return self.complete()

    def complete(self) -> int:
        """`finish`, outside a coroutine."""
        for part in range(self._started, len(self._spans)):
            self.start(part)
        # one worker may have computed for longer than the timeout: that alone is no failure
        least = time.monotonic() + min(self._seconds, GRACE_SECONDS)
        self._all_reduce.wait(self, self._works, max(self._deadline, least))
        for piece, staged in self._staged:
            if staged.data_ptr() != piece.data_ptr():
                piece.copy_(staged)
        self._works.clear()
        self._staged.clear()
        return ring_bytes(self._nbytes, self._all_reduce.schedule.workers)


def _spans(v: Tensor, parts: Sequence[slice]) -> list[Span]:
    if v.dim() != 1:
        raise ValueError(f"only a flat vector has parts, not a tensor of shape {tuple(v.shape)}")
    spans = [part.indices(len(v)) for part in parts]
    end = 0
    for first, last, step in sorted(spans):
        if step != 1 or first != end or last < first:
            raise ValueError(
                f"the parts must cover all {len(v)} elements without gaps or overlaps, but a part that "
                f"ends at {end} is followed by [{first}:{last}:{step}]"
            )
        end = last
    if end != len(v):
        raise ValueError(f"the parts end at element {end} of {len(v)}: they must cover the vector")
    return [(first, last) for first, last, _ in spans]


def _signature(v: Tensor, spans: list[Span]) -> Signature:
    whole = f"{len(v)} x {str(v.dtype).removeprefix('torch.')}"
    if v.device.type != "cpu":
        whole += f" on {v.device.type}"
    if len(spans) == 1:
        return whole
    return f"{whole} in {len(spans)} parts ({hashlib.sha256(repr(spans).encode()).hexdigest()[:8]})"
