"""MpiSums: MPI's all-reduce, but one that says who is missing and survives a wrong length."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Set

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from shoal.transports.agreement import GRACE_SECONDS, Agreement, Position
from shoal.transports.mpi_types import MPI_TYPES
from shoal.transports.polling import Polling
from shoal.transports.sums import Sums

CHUNK_ELEMENTS = 1 << 20
"""What is summed at once; several chunks are under way, so that one is added up while another travels."""

_POSITION = struct.Struct("<q120s")
POSITION_BYTES = _POSITION.size

Ask = Callable[[Iterable[int], float], dict[int, Position]]


def pack(position: Position) -> bytes:
    """A position as it travels."""
    return _POSITION.pack(position.number, position.brings.encode("ascii"))


def unpack(raw: bytes | bytearray | memoryview) -> Position:
    """What `pack` was given."""
    number, brings = _POSITION.unpack(raw)
    return Position(number, brings.rstrip(b"\0").decode("ascii", errors="replace"))


class MpiSums(Sums):
    """A group of the workers. `ask` tells how far others are, `gone` who has left.

    MPI moves on only inside its own calls: what has started is summed during the computing because the
    transport's receiving thread keeps asking MPI for messages, once in a millisecond or more often.
    """

    def __init__(self, mesh: MPI.Intracomm, rank: int, workers: int, gone: Set[int], ask: Ask) -> None:
        self._ring = mesh.Create_group(mesh.Get_group().Incl(range(workers)))
        self._talk = self._ring.Dup()  # who departs from the schedule must not meet the others in the ring
        super().__init__(_TalkAgreement(rank, workers, gone, self._talk, ask))

    def free(self) -> None:
        """Give the groups back; all workers do so together."""
        if not self.agreement.is_broken and not self._held:
            self._talk.Free()
            self._ring.Free()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """Half precision is summed in single: MPI cannot add 16 bits."""
        return dtype if dtype in MPI_TYPES else torch.float32

    def _post(self, host: Tensor) -> list[MPI.Request]:
        flat, name = host.numpy(), MPI_TYPES[host.dtype]
        return [
            self._ring.Iallreduce(MPI.IN_PLACE, [flat[begin : begin + CHUNK_ELEMENTS], name], MPI.SUM)
            for begin in range(0, len(flat), CHUNK_ELEMENTS)
        ]

    def _wait(self, works: list[MPI.Request], deadline: float) -> None:
        if not finished(works, deadline, self.agreement):
            raise self.agreement.failure(deadline)


class _TalkAgreement(Agreement):
    """Workers who compare notes in a group of their own, and are asked by message when that fails."""

    silent = "does not answer"

    def __init__(self, rank: int, workers: int, gone: Set[int], talk: MPI.Intracomm, ask: Ask) -> None:
        super().__init__(rank, workers, gone)
        self._talk, self._ask = talk, ask
        self._held: MPI.Request | None = None  # of notes that did not come: MPI may still write to them

    def _compare(self, deadline: float) -> dict[int, Position]:
        mine = np.frombuffer(pack(self.here), np.uint8)
        notes = np.empty((self.workers, POSITION_BYTES), np.uint8)
        request = self._talk.Iallgather(mine, notes)
        if not finished([request], deadline, self):
            self._held = request
            raise self.failure(deadline)
        return {rank: unpack(note.tobytes()) for rank, note in enumerate(notes)}

    def _roll_call(self, deadline: float) -> dict[int, Position]:
        return self._ask(set(range(self.workers)) - {self.rank} - self.gone, GRACE_SECONDS)


def finished(requests: list[MPI.Request], deadline: float, agreement: Agreement) -> bool:
    """Wait until MPI has done it; False if it takes too long, which is soon once a worker has left."""
    polling = Polling()
    while not MPI.Request.Testall(requests):
        now = time.monotonic()
        if any(worker in agreement.gone for worker in range(agreement.workers)):
            deadline = min(deadline, now + GRACE_SECONDS)
        if now > deadline:
            return False
        polling.pause()
    return True
