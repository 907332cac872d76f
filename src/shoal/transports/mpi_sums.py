"""Sums: MPI's all-reduce among the workers, but one that says who is missing and survives a wrong length."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.core.transport import DTYPES
from shoal.transports.polling import Polling

CHUNK_ELEMENTS = 1 << 20
"""What is summed at once; several chunks are under way, so that one is added up while another travels."""

GRACE_SECONDS = 2.0
"""How long a sum may go on after a worker has left, and how long others have to say how far they are."""

MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}
"""What MPI can add. The 16 bits of half precision it cannot: they are summed in single."""


@dataclass(frozen=True)
class Position:
    """How far a worker is: the number of its latest sum, and what it brought to that."""

    number: int = 0
    elements: int = 0
    code: int = 0  # of the dtype, by its place among DTYPES

    _layout: ClassVar[struct.Struct] = struct.Struct("<qqq")

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray) -> Position:
        return cls(*cls._layout.unpack(raw))

    def __bytes__(self) -> bytes:
        return self._layout.pack(self.number, self.elements, self.code)

    @property
    def brings(self) -> str:
        return f"{self.elements} x {str(DTYPES[self.code]).removeprefix('torch.')}"


Ask = Callable[[Iterable[int], float], dict[int, Position]]


class Sums:
    """One worker's part in them. `ask` tells how far others are, `gone` who has left."""

    def __init__(self, mesh: MPI.Intracomm, rank: int, workers: int, gone: Set[int], ask: Ask) -> None:
        group = mesh.Get_group().Incl(range(workers))
        self._ring = mesh.Create_group(group)
        self._talk = self._ring.Dup()  # who departs from the schedule must not meet the others in the ring
        self._rank, self._workers, self._gone, self._ask = rank, workers, gone, ask
        self._successor: dict[str, str] = {}
        self._broken: str | None = None
        self._held: list[MPI.Request] = []  # of a sum that failed: MPI may still write to its memory
        self.position = Position()

    def sum(self, v: Tensor, seconds: float) -> int:
        if v.dtype not in DTYPES:
            raise ValueError(f"all_reduce cannot sum {v.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if self._broken:
            raise PeerLost(self._broken)
        if self._workers == 1:
            return 0
        deadline = time.monotonic() + seconds
        self._agree_on(Position(self.position.number + 1, v.numel(), DTYPES.index(v.dtype)), deadline)
        wide = v.dtype if v.dtype in MPI_TYPES else torch.float32
        host = v.detach().to("cpu", wide).contiguous()  # shares the memory of v where it can
        flat, name = host.view(-1).numpy(), MPI_TYPES[wide]
        self._finish(
            [
                self._ring.Iallreduce(MPI.IN_PLACE, [flat[begin : begin + CHUNK_ELEMENTS], name], MPI.SUM)
                for begin in range(0, len(flat), CHUNK_ELEMENTS)
            ],
            deadline,
        )
        if host.data_ptr() != v.data_ptr():
            v.detach().copy_(host)
        return 2 * (self._workers - 1) * host.nbytes // self._workers

    def free(self) -> None:
        """Give the groups back; all workers do so together."""
        if not self._broken:
            self._talk.Free()
            self._ring.Free()

    def _agree_on(self, here: Position, deadline: float) -> None:
        """Compare what the workers bring, unless it is what was to be expected; MPI would not notice.

        Expected is what followed last time. All workers agreed on everything so far, so they all expect
        the same; one that brings something else asks the others, who do not answer, and nobody gets
        into the ring with a wrong length.
        """
        last = self.position.brings if self.position.number else None
        self.position = here
        if last is None or self._successor.get(last, last) != here.brings:
            mine, all_of_them = np.frombuffer(bytes(here), np.int64), np.empty((self._workers, 3), np.int64)
            self._finish([self._talk.Iallgather(mine, all_of_them)], deadline)
            self._refuse_mismatch({rank: Position(*row) for rank, row in enumerate(all_of_them.tolist())})
        if last is not None:
            self._successor[last] = here.brings

    def _finish(self, requests: list[MPI.Request], deadline: float) -> None:
        """Wait until MPI has done it. Raises what there is to be said if that takes too long."""
        polling = Polling()
        while not MPI.Request.Testall(requests):
            now = time.monotonic()
            if any(worker in self._gone for worker in range(self._workers)):
                deadline = min(deadline, now + GRACE_SECONDS)
            if now > deadline:
                self._held += requests
                raise self._diagnosis()
            polling.pause()

    def _diagnosis(self) -> PeerLost:
        """Ask every worker how far it is; who is behind is missing. Raises ValueError for a mismatch."""
        here = self.position
        others = set(range(self._workers)) - {self._rank}
        found = self._ask(others - self._gone, GRACE_SECONDS)
        failed = f"all_reduce {here.number} of {here.brings} failed (I am worker {self._rank})"
        self._broken = failed
        self._refuse_mismatch({self._rank: here, **found})
        fates = [f"worker {r} is gone" for r in sorted(others & self._gone - found.keys())]
        fates += [f"worker {r} did not come in time" for r in sorted(found) if found[r].number < here.number]
        fates += [f"worker {r} does not answer" for r in sorted(others - self._gone - found.keys())]
        self._broken = f"{failed}: {', '.join(fates) or 'everyone is alive, but somebody came late'}"
        return PeerLost(self._broken)

    def _refuse_mismatch(self, found: dict[int, Position]) -> None:
        here = self.position.number
        brought = {rank: position.brings for rank, position in found.items() if position.number == here}
        if len(set(brought.values())) > 1:
            listed = ", ".join(f"worker {rank} brings {what}" for rank, what in sorted(brought.items()))
            raise ValueError(f"all_reduce {here} needs the same dtype and length from all: {listed}")
