"""MpiAllReduce: MPI's all-reduce, with errors that name the missing worker and report wrong lengths."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np
import torch
from torch import Tensor

from shoal.transports.all_reduce import GRACE_SECONDS, CollectiveSchedule, Position, TransportAllReduce
from shoal.transports.mpi.library import MPI, MPI_TYPES, Polling

CHUNK_ELEMENTS = 1 << 20
"""Elements per MPI call; several chunks are under way, so that one is added while another is sent."""

_POSITION = struct.Struct("<q120s")
POSITION_BYTES = _POSITION.size

Ask = Callable[[Iterable[int], float], dict[int, Position]]


def pack_position(position: Position) -> bytes:
    """A position as bytes."""
    return _POSITION.pack(position.number, position.signature.encode("ascii"))


def unpack_position(raw: bytes | bytearray | memoryview) -> Position:
    """The position from its bytes."""
    number, signature = _POSITION.unpack(raw)
    return Position(number, signature.rstrip(b"\0").decode("ascii", errors="replace"))


class MpiAllReduce(TransportAllReduce):
    """All-reduce in a group of the workers. `ask` returns the positions of others, `gone` holds who left.

    MPI progresses only inside its calls. Started parts are summed during the computation because the
    transport's receiving thread polls MPI at least once per millisecond.
    """

    def __init__(self, mesh: MPI.Intracomm, rank: int, workers: int, gone: Set[int], ask: Ask) -> None:
        self._ring = mesh.Create_group(mesh.Get_group().Incl(range(workers)))
        self._notes = self._ring.Dup()  # a deviating worker must not meet the others in `_ring`
        super().__init__(_MpiSchedule(rank, range(workers), gone, self._notes, ask))

    def free(self) -> None:
        """Free the groups; all workers do so together."""
        if not self.schedule.is_broken and not self._held:
            self._notes.Free()
            self._ring.Free()

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Half precision is summed in float32: MPI cannot add 16-bit floats."""
        return dtype if dtype in MPI_TYPES else torch.float32

    def _post(self, host: Tensor) -> list[MPI.Request]:
        flat, name = host.numpy(), MPI_TYPES[host.dtype]
        return [
            self._ring.Iallreduce(MPI.IN_PLACE, [flat[begin : begin + CHUNK_ELEMENTS], name], MPI.SUM)
            for begin in range(0, len(flat), CHUNK_ELEMENTS)
        ]

    def _wait(self, works: list[MPI.Request], deadline: float) -> None:
        if not finished(works, deadline, self.schedule):
            raise self.schedule.failure(deadline)


class _MpiSchedule(CollectiveSchedule):
    """Compares positions by an all-gather in a group of its own, and by messages after a failure."""

    silent = "does not answer"

    def __init__(
        self, rank: int, ranks: Sequence[int], gone: Set[int], notes: MPI.Intracomm, ask: Ask
    ) -> None:
        super().__init__(rank, ranks, gone)
        self._notes, self._ask = notes, ask
        self._held: MPI.Request | None = None  # a late all-gather: MPI may still write to its memory

    def _compare(self, deadline: float) -> dict[int, Position]:
        mine = np.frombuffer(pack_position(self.here), np.uint8)
        notes = np.empty((self.workers, POSITION_BYTES), np.uint8)
        request = self._notes.Iallgather(mine, notes)
        if not finished([request], deadline, self):
            self._held = request
            raise self.failure(deadline)
        return {rank: unpack_position(note.tobytes()) for rank, note in enumerate(notes)}

    def _survivors(self, deadline: float) -> dict[int, Position]:
        return self._ask(set(range(self.workers)) - {self.rank} - self.gone, GRACE_SECONDS)


def finished(requests: list[MPI.Request], deadline: float, schedule: CollectiveSchedule) -> bool:
    """Wait until MPI is done; False after the deadline, which is near once a worker has left."""
    polling = Polling()
    while not MPI.Request.Testall(requests):
        now = time.monotonic()
        if any(worker in schedule.gone for worker in range(schedule.workers)):
            deadline = min(deadline, now + GRACE_SECONDS)
        if now > deadline:
            return False
        polling.pause()
    return True
