"""Windows: a vector in shared memory that all processes of a host read and add to."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.transports.frames import WINDOW, MemoryLocation, Shape, bytes_of, flatten
from shoal.transports.shared_memory.memory import COUNT, HEAD_BYTES, SharedMemory, fence

STRIPE_BYTES = 256 * 1024
"""Bytes locked at once. Additions to different stripes do not wait for each other."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_FLOCK = struct.Struct("hhqqixxxx")  # type, whence, start, length, pid
_COUNT = -1  # in place of a stripe
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class SharedWindow:
    """One node's view of the exposed vector.

    An addition locks the bytes it changes, stripe by stripe, with open-file-description locks. Each node has
    its own open file, so the locks exclude threads as well as processes. The kernel releases them when the
    holder dies. They are also the memory barrier between one holder and the next.
    """

    def __init__(self, memory: SharedMemory, shape: Shape, *, owner: int, rank: int, timeout: float) -> None:
        (self.vector,) = memory.tensors([shape])
        self.owner = owner
        self._memory = memory
        self._rank = rank
        self._timeout = timeout
        self._mutex = threading.Lock()  # the threads of one node share one open file
        self._gone = False
        self._width = STRIPE_BYTES // self.vector.element_size()
        self._stripes = torch.split(self.vector, self._width)

    def fetch(self, out: Tensor) -> int:
        """Copy the vector into `out`; returns the number of additions finished before. Takes no lock."""
        self.check(out)
        finished = self._memory.words[COUNT]
        fence()  # the counted additions are in the copy
        out.detach().copy_(self.vector.view(out.shape))
        return finished

    def add(self, v: Tensor) -> int:
        """Add `v`, skipping stripes where it is zero; returns the number of additions finished before.

        Raises PeerLost if a lock stays held for the whole timeout.
        """
        self.check(v)
        (flat,) = flatten((v,))
        pieces = torch.split(flat, self._width)
        finished: list[int] = []
        try:
            with self._mutex:
                self._visit(self._touched_by(flat), lambda i: self._stripes[i].add_(pieces[i]))
                self._visit(deque([_COUNT]), lambda _: finished.append(self._bump()))
        finally:
            if self._gone:
                self.close()
        return finished[0]

    def check(self, v: Tensor) -> None:
        """Raise ValueError unless `v` fits the exposed vector."""
        mine, theirs = (v.numel(), v.dtype), (self.vector.numel(), self.vector.dtype)
        if mine != theirs:
            raise ValueError(
                f"the window of node {self.owner} holds {theirs[0]} x {theirs[1]}, "
                f"node {self._rank} brings {mine[0]} x {mine[1]}"
            )

    def close(self) -> None:
        """Close the file, now or at the end of a running addition. Never waits."""
        self._gone = True
        if self._mutex.acquire(blocking=False):
            self._memory.close()
            self._mutex.release()

    def _touched_by(self, flat: Tensor) -> deque[int]:
        """The stripes where `flat` is not zero. Each node starts at another stripe, to avoid queues."""
        raw = np.frombuffer(bytes_of(flat), _RAW[flat.element_size()])
        begins = raw[:: self._width] != 0  # enough for a dense vector
        stripes = len(self._stripes)
        first = self._rank * 7919 % stripes  # a prime: neighbours in rank are far apart
        order = ((first + i) % stripes for i in range(stripes))
        return deque(i for i in order if begins[i] or raw[i * self._width : (i + 1) * self._width].any())

    def _bump(self) -> int:
        finished = self._memory.words[COUNT]
        self._memory.words[COUNT] = finished + 1
        return finished

    def _visit(self, waiting: deque[int], work: Callable[[int], object]) -> None:
        """Do the work at every stripe, first at those that are not locked."""
        since, pause, misses = 0.0, _SHORTEST_PAUSE, 0
        while waiting:
            if self._gone:
                raise PeerLost(f"node {self.owner} was lost while node {self._rank} added to its window")
            stripe = waiting.popleft()
            if self._lock(stripe):
                try:
                    work(stripe)
                finally:
                    self._unlock(stripe)
                since, pause, misses = 0.0, _SHORTEST_PAUSE, 0
                continue
            waiting.append(stripe)
            misses += 1
            if misses < len(waiting):
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._timeout:
                raise PeerLost(
                    f"another node has locked a stripe of the window of node {self.owner} for "
                    f"{self._timeout:g} s; node {self._rank} cannot add to it. Is a process stopped?"
                )
            time.sleep(pause)
            pause, misses = min(2 * pause, _LONGEST_PAUSE), 0

    def _lock(self, stripe: int) -> bool:
        """Try to lock a stripe, or the count; whether that succeeded."""
        try:
            fcntl.fcntl(self._memory.fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, stripe))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, stripe: int) -> None:
        fcntl.fcntl(self._memory.fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, stripe))


@cache
def _request(kind: int, stripe: int) -> bytes:
    if stripe == _COUNT:
        return _FLOCK.pack(kind, os.SEEK_SET, 8 * COUNT, 8, 0)
    return _FLOCK.pack(kind, os.SEEK_SET, HEAD_BYTES + stripe * STRIPE_BYTES, STRIPE_BYTES, 0)


class WindowTable:
    """The windows that one node knows: its own, and those announced by peers."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._windows: dict[int, SharedWindow] = {}
        self.own: tuple[Tensor, MemoryLocation] | None = None  # how this node's window is announced
        self._changed = threading.Condition()

    def open_own(self, x: Tensor) -> SharedWindow:
        """Expose a copy of `x`."""
        if self.own is not None:
            raise ValueError(f"node {self._rank} already has a window; only one is allowed")
        if x.numel() == 0:
            raise ValueError("a window needs at least one element")
        (flat,) = flatten((x,))
        try:
            memory = SharedMemory.create(flat.nbytes)
        except OSError as error:
            raise Unavailable(f"no shared memory for a window of {flat.nbytes:,} bytes: {error}") from error
        shape = (flat.dtype, flat.numel())
        window = SharedWindow(memory, shape, owner=self._rank, rank=self._rank, timeout=self._timeout)
        window.vector.copy_(flat)
        self.own = window.vector, MemoryLocation(WINDOW, memory.fd, memory.serial)
        self._windows[self._rank] = window
        return window

    def register(self, owner: int, memory: SharedMemory, shapes: Sequence[Shape]) -> None:
        """Add a window that a peer has announced. Raises WireError if it is not valid."""
        try:
            if len(shapes) != 1 or shapes[0][1] == 0:
                raise WireError(f"node {owner} announces a window with shapes {shapes}")
            window = SharedWindow(memory, shapes[0], owner=owner, rank=self._rank, timeout=self._timeout)
        except BaseException:
            memory.close()
            raise
        with self._changed:
            self._drop(owner)
            self._windows[owner] = window
            self._changed.notify_all()

    def remove(self, owner: int) -> None:
        """Remove the window of a lost peer."""
        with self._changed:
            self._drop(owner)
            self._changed.notify_all()

    def find(self, owner: int) -> SharedWindow:
        """The window of `owner`. Raises PeerLost if it is not open."""
        window = self._windows.get(owner)
        if window is None:
            raise PeerLost(
                f"node {self._rank} knows no window of node {owner}: not opened, or its owner is lost"
            )
        return window

    def await_window(self, owner: int, gone: Callable[[], bool]) -> SharedWindow:
        """Wait for the window of `owner`. Raises PeerLost if it is lost, or opens none in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: owner in self._windows or gone(), self._timeout)
            window = self._windows.get(owner)
        if window is None:
            how = (
                "was lost before it opened"
                if there
                else f"did not open its window within {self._timeout:g} s"
            )
            how = f"{how} its window" if there else how
            raise PeerLost(f"node {owner} {how} (I am node {self._rank})")
        return window

    def close(self) -> None:
        """Close all files."""
        with self._changed:
            for owner in list(self._windows):
                self._drop(owner)

    def _drop(self, owner: int) -> None:
        window = self._windows.pop(owner, None)
        if window is not None:
            window.close()
