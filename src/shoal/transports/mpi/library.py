"""MPI's library: mpi4py or a clear error, the datatypes that it can add, and waiting without a busy core."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.core.errors import Unavailable

try:
    from mpi4py import MPI
except ImportError as missing:
    raise Unavailable("transport 'mpi' needs mpi4py. Install it with: pip install 'shoal[mpi]'") from missing
except RuntimeError as missing:  # mpi4py is installed, the MPI library that it loads is not
    raise Unavailable(
        f"transport 'mpi' finds no MPI library ({missing}). Install one with: pip install 'shoal[mpi]'"
    ) from missing

MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
}
"""MPI's names of the dtypes that it can add; half precision is not among them."""

SHORTEST_SECONDS = 1e-6
LONGEST_SECONDS = 1e-3


class Polling:
    """Pauses between polls, which grow from 1 us to 1 ms while nothing happens: MPI itself would spin."""

    def __init__(self) -> None:
        self._seconds = SHORTEST_SECONDS

    def reset(self) -> None:
        """Start again with short pauses: something happened."""
        self._seconds = SHORTEST_SECONDS

    def pause(self) -> None:
        """Sleep, longer each time."""
        time.sleep(self._seconds)  # also releases the GIL
        self._seconds = min(1.25 * self._seconds, LONGEST_SECONDS)


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Call `done` until it returns True; False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    polling = Polling()
    while not done():
        if time.monotonic() > deadline:
            return False
        polling.pause()
    return True


__all__ = ["MPI", "MPI_TYPES", "Polling", "poll"]
