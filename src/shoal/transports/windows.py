"""Windows: a vector in memory that all processes of a host have mapped, to read it and to add to it."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.transports.frames import WINDOW, Place, Shape, bytes_of, flatten
from shoal.transports.memory import COUNT, HEAD_BYTES, Memory, fence

STRIPE_BYTES = 256 * 1024
"""What is locked at once. Additions to different stripes do not wait for each other."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_FLOCK = struct.Struct("hhqqixxxx")  # type, whence, start, length, pid
_COUNT = -1  # in place of a stripe
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Window:
    """One node's view of the exposed vector.

    An addition locks the bytes it changes, stripe by stripe, with locks of the open file: every node has
    opened it for itself, so that they exclude threads as well as processes, and the kernel lifts them when
    their holder dies. That also puts the memory in order between one holder and the next.
    """

    def __init__(self, memory: Memory, shape: Shape, *, owner: int, rank: int, timeout: float) -> None:
        (self.vector,) = memory.tensors([shape])
        self.owner = owner
        self._memory = memory
        self._rank = rank
        self._timeout = timeout
        self._mutex = threading.Lock()  # threads of one node have one open file
        self._gone = False
        self._width = STRIPE_BYTES // self.vector.element_size()
        self._stripes = torch.split(self.vector, self._width)

    def fetch(self, out: Tensor) -> int:
        """Copy the vector into `out`; how many additions were finished when that began. Takes no lock."""
        self.check(out)
        finished = self._memory.words[COUNT]
        fence()  # what is counted is in the copy
        out.detach().copy_(self.vector.view(out.shape))
        return finished

    def add(self, v: Tensor) -> int:
        """Add `v`, leaving out stripes where it is zero; how many additions were finished before.

        Raises PeerLost when nobody lets go of a lock for the whole timeout.
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
        """Close the file, at the latest when an addition that is under way has ended. Never waits."""
        self._gone = True
        if self._mutex.acquire(blocking=False):
            self._memory.close()
            self._mutex.release()

    def _touched_by(self, flat: Tensor) -> deque[int]:
        """The stripes where it is not zero; each node begins at another, so that they do not queue up."""
        raw = np.frombuffer(bytes_of(flat), _RAW[flat.element_size()])
        begins = raw[:: self._width] != 0  # a dense vector shows it at once
        stripes = len(self._stripes)
        first = self._rank * 7919 % stripes  # a prime: neighbours in rank are far apart
        order = ((first + i) % stripes for i in range(stripes))
        return deque(i for i in order if begins[i] or raw[i * self._width : (i + 1) * self._width].any())

    def _bump(self) -> int:
        finished = self._memory.words[COUNT]
        self._memory.words[COUNT] = finished + 1
        return finished

    def _visit(self, waiting: deque[int], work: Callable[[int], object]) -> None:
        """Do the work at every stripe, first where nobody else is at it."""
        since, pause, misses = 0.0, _SHORTEST_PAUSE, 0
        while waiting:
            if self._gone:
                raise PeerLost(f"node {self.owner} went while node {self._rank} added to its window")
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
                    f"somebody has held a part of the window of node {self.owner} for {self._timeout:g} s; "
                    f"node {self._rank} cannot add to it. Is one of the processes stopped?"
                )
            time.sleep(pause)
            pause, misses = min(2 * pause, _LONGEST_PAUSE), 0

    def _lock(self, stripe: int) -> bool:
        """Try to hold a stripe, or the count; whether that worked."""
        try:
            fcntl.fcntl(self._memory.fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, stripe))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, stripe: int) -> None:
        fcntl.fcntl(self._memory.fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, stripe))


def _request(kind: int, stripe: int) -> bytes:
    if stripe == _COUNT:
        return _FLOCK.pack(kind, os.SEEK_SET, 8 * COUNT, 8, 0)
    return _FLOCK.pack(kind, os.SEEK_SET, HEAD_BYTES + stripe * STRIPE_BYTES, STRIPE_BYTES, 0)


class Board:
    """The windows that one node knows: its own, and those it was told of."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._windows: dict[int, Window] = {}
        self.own: tuple[Tensor, Place] | None = None  # what to tell others of this node's window
        self._changed = threading.Condition()

    def open_own(self, x: Tensor) -> Window:
        """Expose a copy of `x`."""
        if self.own is not None:
            raise ValueError(f"node {self._rank} has a window already; one for each owner")
        if x.numel() == 0:
            raise ValueError("a window needs at least one element")
        (flat,) = flatten((x,))
        try:
            memory = Memory.create(flat.nbytes)
        except OSError as error:
            raise Unavailable(f"no shared memory for a window of {flat.nbytes:,} bytes: {error}") from error
        shape = (flat.dtype, flat.numel())
        window = Window(memory, shape, owner=self._rank, rank=self._rank, timeout=self._timeout)
        window.vector.copy_(flat)
        self.own = window.vector, Place(WINDOW, memory.fd, memory.serial)
        self._windows[self._rank] = window
        return window

    def post(self, owner: int, memory: Memory, shapes: Sequence[Shape]) -> None:
        """Take note of a window that a peer has opened. Raises WireError if it is none."""
        try:
            if len(shapes) != 1 or shapes[0][1] == 0:
                raise WireError(f"node {owner} tells of a window with {shapes}")
            window = Window(memory, shapes[0], owner=owner, rank=self._rank, timeout=self._timeout)
        except BaseException:
            memory.close()
            raise
        with self._changed:
            self._drop(owner)
            self._windows[owner] = window
            self._changed.notify_all()

    def remove(self, owner: int) -> None:
        """Forget the window of a peer that is gone."""
        with self._changed:
            self._drop(owner)
            self._changed.notify_all()

    def find(self, owner: int) -> Window:
        """The window of that node, which must be open."""
        window = self._windows.get(owner)
        if window is None:
            raise PeerLost(
                f"the window of node {owner} is not open at node {self._rank}, or its owner is gone"
            )
        return window

    def await_window(self, owner: int, gone: Callable[[], bool]) -> Window:
        """The window that node is about to open. Raises PeerLost if it is gone, or does not in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: owner in self._windows or gone(), self._timeout)
            window = self._windows.get(owner)
        if window is None:
            how = "was gone before it opened" if there else f"did not within {self._timeout:g} s open"
            raise PeerLost(f"node {owner} {how} its window (I am node {self._rank})")
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
