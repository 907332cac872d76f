"""SharedMemory: an anonymous file (memfd) that the processes of one host map; freed with its last holder."""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.core.errors import Unavailable, WireError
from shoal.transports.forks import close_on_fork
from shoal.transports.frames import Shape

SWITCH = "SHOAL_SHARED_MEMORY"
"""Environment variable: 0 disables shared memory, 1 requires it."""

HEAD_BYTES = 4096
"""Bytes before the contents: words through which the processes synchronise."""

# Words of the head. Each has one writer at a time; loads and stores of eight aligned bytes are atomic.
_MAGIC, _SERIAL, _RETIRED = 0, 1, 2
FREED = 3  # of a large message's buffer: the number of the last message that its receiver has released
COUNT = 4  # of a window: finished additions
REVISION = 5  # of shown memory: how often its owner has begun to change it
HAS_GPU = 6  # of a large message's buffer: whether its receiver is on a GPU
UNMAPPED = 7  # of a large message's buffer on a GPU: whether its receiver has unmapped it
GPU = 8  # of a large message's buffer: two words that name the receiver's GPU
SLOTS = 8  # of lent memory: from here on two words for each shared read

ALIGNMENT = 64
"""Every part begins at a multiple of this many bytes."""

NO_PROBE = (0, -1, 0)
"""The probe fields (pid, fd, serial) of a process that shares no memory."""

_NAME = "shoal"
_MARK = int.from_bytes(b"shoal/2\n", "little")
_serials = itertools.count(secrets.randbits(62))  # unlike those of an earlier process with the same pid


def is_supported() -> bool:
    """Whether this system has memfd files that another process can open."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK") and Path("/proc/self/fd").is_dir()


def choose(wanted: bool | None) -> bool:
    """Whether to share memory: as `wanted`, else as the environment says, else if the system supports it."""
    word = os.environ.get(SWITCH, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={word!r} must be 0, 1 or unset")
    if wanted is None and word:
        wanted = word == "1"
    if wanted and not is_supported():
        raise Unavailable(f"shared memory needs memfd_create and /proc, as on Linux. Unset {SWITCH}.")
    return is_supported() if wanted is None else wanted


def fence() -> None:
    """A full memory barrier: other processors see no access before it after one that follows it.

    Arm processors reorder memory accesses. Releasing a lock and then acquiring one is a full barrier on
    every processor: nothing moves down past a release or up past an acquire, and these two keep their
    order. The lock is new, so this never waits, not even in a finalizer.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def layout(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """The offset of each part in memory that holds them all, and the total number of bytes."""
    offsets, end = [], 0
    for dtype, elements in shapes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + dtype.itemsize * elements
    return offsets, end


class SharedMemory:
    """A mapped memfd. `close` closes the file; the mapping lasts as long as a tensor views it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes  # of the contents
        self.is_pinned = False  # whether gpu_memory has tried to pin it
        self._bytes = _map(fd, HEAD_BYTES + nbytes)
        self.words = self._bytes[:HEAD_BYTES].numpy().data.cast("Q")
        close_on_fork(self)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory. Raises OSError if the system has not enough."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserve now, where failure is an error: a page missing later kills the process. Also 2x faster.
            os.posix_fallocate(fd, 0, HEAD_BYTES + nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        memory.words[_SERIAL] = next(_serials)
        memory.words[_MAGIC] = _MARK
        return memory

    @classmethod
    def attach(cls, pid: int, fd: int, serial: int, most_bytes: int) -> SharedMemory:
        """Map memory of another process. Raises WireError unless it is memory `serial`, and not too large."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            target = os.readlink(path)  # noqa: PTH115 - before opening it: opening a device may have effects
            if not target.startswith(f"/memfd:{_NAME} "):
                raise WireError(f"it refers to memory in its file {fd}, which is {target}")
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(f"the memory it refers to cannot be opened: {error}") from error
        try:
            return cls._mapped(handle, serial, most_bytes)
        except BaseException:
            os.close(handle)
            raise

    @classmethod
    def _mapped(cls, handle: int, serial: int, most_bytes: int) -> SharedMemory:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise WireError("the memory it refers to belongs to another user")
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError("the memory it refers to is not sealed: it may shrink under its readers")
        if not HEAD_BYTES <= found.st_size <= HEAD_BYTES + most_bytes:
            raise WireError(
                f"the memory it refers to has {found.st_size:,} bytes, the limit is {most_bytes:,}"
            )
        memory = cls(handle, found.st_size - HEAD_BYTES)
        if memory.words[_MAGIC] != _MARK or memory.serial != serial:
            raise WireError(f"the memory it refers to has serial number {memory.serial}, not {serial}")
        return memory

    @property
    def serial(self) -> int:
        """Its number, unique among the memory of its creator."""
        return self.words[_SERIAL]

    @property
    def retired(self) -> bool:
        """Whether its creator has stopped using it."""
        return self.words[_RETIRED] != 0

    def tensors(
        self, shapes: Sequence[Shape], offset: int = 0, then: Callable[[], object] | None = None
    ) -> tuple[Tensor, ...]:
        """Flat views on the contents, laid out from `offset` on. Raises WireError if they do not fit.

        Calls `then` when the last storage over them dies. That may happen at any allocation, in any
        thread: `then` must not wait for a lock that others take.
        """
        starts, length = layout(shapes)
        if offset + length > self.nbytes:
            raise WireError(f"{length:,} bytes at {offset:,} do not fit memory of {self.nbytes:,}")
        export = self._bytes.numpy()  # a new object each time; the storages reference it
        # the storages keep the memory, and so this keeps the tensor that others watch to know its end
        weakref.finalize(export, _end_of_views, os.getpid(), then, self._bytes).atexit = False
        return tuple(
            _view(export, dtype, elements, HEAD_BYTES + offset + start)
            for (dtype, elements), start in zip(shapes, starts, strict=True)
        )

    @property
    def mapping(self) -> Tensor:
        """All of it, head and contents. Lives until no tensor views it any more."""
        return self._bytes

    def retire(self) -> None:
        """Tell processes that have mapped it that it will not be used again, and close the file."""
        self.words[_RETIRED] = 1
        self.close()

    def close(self) -> None:
        """Close the file, so that no other process can open it. Closing twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class ProbeInfo(Protocol):
    """Where a process keeps its probe. `pid` 0: it shares no memory."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def fd(self) -> int:
        """File descriptor in that process."""
        ...

    @property
    def serial(self) -> int:
        """Serial number of the memory in that file."""
        ...


class MemoryProbe:
    """Empty shared memory. A peer that can map it can map all memory of this process."""

    def __init__(self, share: bool) -> None:
        self._memory = SharedMemory.create(0) if share else None

    @property
    def shares(self) -> bool:
        """Whether this process shares memory at all."""
        return self._memory is not None

    @property
    def location(self) -> tuple[int, int, int]:
        """Where peers find it: pid, file descriptor and serial number."""
        return NO_PROBE if self._memory is None else (os.getpid(), self._memory.fd, self._memory.serial)

    def sharing_pid(self, theirs: ProbeInfo) -> int:
        """The pid of the process at the other end if its memory can be mapped here, else 0."""
        if self._memory is None or theirs.pid <= 0:
            return 0
        try:
            SharedMemory.attach(theirs.pid, theirs.fd, theirs.serial, self._memory.nbytes).close()
        except (WireError, OSError):
            return 0
        return theirs.pid

    def retire(self) -> None:
        """Close the probe."""
        if self._memory is not None:
            self._memory.retire()


def _map(fd: int, nbytes: int) -> Tensor:
    try:  # torch needs no open file afterwards; Python's mmap keeps one
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{nbytes:,} bytes cannot be mapped: {error}") from error


def _end_of_views(pid: int, then: Callable[[], object] | None, mapping: Tensor) -> None:
    if then is not None:
        call_in_creator(pid, then)


def call_in_creator(pid: int, then: Callable[[], object]) -> None:
    """Call `then`, unless this is a forked child in which copies die."""
    if os.getpid() == pid:  # not when the copies in a forked child die
        then()


def _view(export: npt.NDArray[np.uint8], dtype: torch.dtype, elements: int, offset: int) -> Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize:
        raise WireError(f"{dtype} cannot begin at byte {offset}")
    return torch.frombuffer(export, dtype=dtype, count=elements, offset=offset)
