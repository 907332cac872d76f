"""MpiWindow: a vector that all ranks read and add to (one-sided: the owner makes no matching call)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.transports.mpi.library import MPI, MPI_TYPES, poll

CHUNK_BYTES = 4 << 20
"""Bytes per MPI call, during which no other rank can access the vector."""

UNDER_WAY = 2
"""Additions under way, so that one is sent while another is added."""

_DTYPES = (torch.float32, torch.float64)
_HEAD_BYTES = 64  # the version, alone in its cache line
_NOTHING = np.empty(0, np.uint8)


class MpiWindow:
    """Memory allocated by MPI: the ranks of one host share only such memory.

    Every rank holds a shared lock from beginning to end, so that no operation acquires one. Reads are
    accumulates that add nothing: MPI guarantees atomic elements only among accumulates.
    """

    def __init__(self, mesh: MPI.Intracomm, owner: int, x: Tensor, timeout: float) -> None:
        if x.dtype not in _DTYPES:
            raise ValueError(f"a window holds float32 or float64, not {x.dtype}")
        self._mesh, self._owner, self._timeout = mesh, owner, timeout
        self._dtype, self._elements = x.dtype, x.numel()
        self._held: list[MPI.Request] = []  # timed out: MPI may still write to their memory
        self._agree()
        # an addition is complete once it has returned the previous contents
        most = min(self._elements, CHUNK_BYTES // x.element_size())
        self._before = torch.empty(UNDER_WAY, most, dtype=x.dtype).numpy()
        own = mesh.Get_rank() == owner
        nbytes = _HEAD_BYTES + x.numel() * x.element_size() if own else 0
        self._window = MPI.Win.Allocate(nbytes, 1, MPI.INFO_NULL, mesh)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.memory = self._fill(x) if own else None
        if not poll(mesh.Ibarrier().Test, timeout):  # no rank reads before it is filled
            raise self._alone()

    def fetch(self, out: Tensor) -> int:
        self._check(out)
        version = self._count(0)
        host = out.detach().to("cpu").contiguous().view(-1)  # shares the memory of out if possible
        nothing = [_NOTHING, 0, MPI_TYPES[self._dtype]]
        requests = [
            self._window.Rget_accumulate(nothing, chunk, self._owner, target, MPI.NO_OP)
            for chunk, target in self._chunks(host)
        ]
        self._finish(requests, "did not return the contents of")
        if host.data_ptr() != out.data_ptr():
            out.detach().copy_(host.view(out.shape))
        return version

    def accumulate(self, v: Tensor) -> int:
        self._check(v)
        under_way: list[MPI.Request] = []
        for number, (chunk, target) in enumerate(self._chunks(v.detach().to("cpu").contiguous().view(-1))):
            self._take_turn(under_way, UNDER_WAY - 1)
            _, elements, name = target
            before = [self._before[number % UNDER_WAY][:elements], name]
            under_way.append(self._window.Rget_accumulate(chunk, before, self._owner, target, MPI.SUM))
        self._take_turn(under_way, 0)  # done before the version counts it
        return self._count(1)

    def free(self) -> None:
        """Free the memory; all ranks do so together, once no tensor views it.

        Without a deadline: another rank may work for long, and MPI's own finalisation waits for it anyway.
        """
        poll(self._mesh.Ibarrier().Test, float("inf"))
        self._window.Unlock_all()
        self._window.Free()

    def _agree(self) -> None:
        """Compare the vectors of all ranks; a rank that will not use the window may pass an empty one."""
        mine = np.array([self._elements, self._dtype.itemsize], np.int64)
        found = np.empty((self._mesh.Get_size(), 2), np.int64)
        if not poll(self._mesh.Iallgather(mine, found).Test, self._timeout):
            raise self._alone()
        brought = {
            rank: tuple(row) for rank, row in enumerate(found.tolist()) if row[0] or rank == self._owner
        }
        if len(set(brought.values())) > 1:
            listed = ", ".join(f"node {rank} {n} of {nbytes} bytes" for rank, (n, nbytes) in brought.items())
            raise ValueError(f"a window needs vectors of one dtype and length from all nodes: {listed}")

    def _alone(self) -> PeerLost:
        return PeerLost(
            f"not all {self._mesh.Get_size()} nodes came to open the window of node {self._owner} within "
            f"{self._timeout:g} s (I am node {self._mesh.Get_rank()})"
        )

    def _fill(self, x: Tensor) -> Tensor:
        """The exposed vector, filled with `x`, after version 0."""
        raw = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)
        raw[:_HEAD_BYTES] = 0
        memory = raw[_HEAD_BYTES:].view(self._dtype)
        memory.copy_(x.detach().view(-1))
        self._window.Sync()
        return memory

    def _count(self, increment: int) -> int:
        """Add to the version; returns the previous one."""
        before = np.empty(1, np.int64)
        request = self._window.Rget_accumulate(
            np.array([increment], np.int64), before, self._owner, (0, 1, MPI.INT64_T), MPI.SUM
        )
        self._finish([request], "did not return the version of")
        return int(before[0])

    def _take_turn(self, under_way: list[MPI.Request], most: int) -> None:
        """Wait for the oldest additions until at most `most` are under way."""
        while len(under_way) > most:
            try:
                self._finish(under_way[:1], "did not complete an addition to")
            except PeerLost:
                self._held += under_way
                raise
            del under_way[0]

    def _finish(self, requests: list[MPI.Request], what: str) -> None:
        if not poll(lambda: MPI.Request.Testall(requests), self._timeout):
            self._held += requests
            raise PeerLost(f"node {self._owner} {what} its window within {self._timeout:g} s")

    def _check(self, v: Tensor) -> None:
        if v.dtype != self._dtype or v.numel() != self._elements:
            raise ValueError(
                f"the window of node {self._owner} holds {self._elements} x {self._dtype}, "
                f"not {v.numel()} x {v.dtype}"
            )

    def _chunks(self, flat: Tensor) -> Iterator[tuple[list[Any], tuple[int, int, MPI.Datatype]]]:
        """Pieces of a vector, each with its target in the window."""
        name, most = MPI_TYPES[self._dtype], CHUNK_BYTES // self._dtype.itemsize
        for begin in range(0, self._elements, most):
            piece = flat[begin : begin + most].numpy()
            yield [piece, name], (_HEAD_BYTES + begin * self._dtype.itemsize, len(piece), name)
