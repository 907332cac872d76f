"""Memory that processes of one host share: a nameless file, gone with the last process that holds it."""

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
from shoal.transports.forks import own
from shoal.transports.frames import Shape

SWITCH = "SHOAL_SHARED_MEMORY"
"""Environment variable: 0 sends everything over the connections, 1 insists on shared memory."""

HEAD_BYTES = 4096
"""What comes before the contents: words through which the processes tell each other how far they are."""

# Words of the head. Each has one writer at a time, and eight aligned bytes are written and read at once.
_MAGIC, _SERIAL, _RETIRED = 0, 1, 2
FREED = 3  # of a parcel: the number of the last one that its receiver has no more use for
COUNT = 4  # of a window: additions that are finished
SLOTS = 8  # of lent memory: from here on two words for each loan

ALIGNMENT = 64
"""Every part begins at a multiple of this."""

NOWHERE = (0, -1, 0)
"""What a process shows of its probe if it shares no memory."""

_NAME = "shoal"
_MARK = int.from_bytes(b"shoal/2\n", "little")
_serials = itertools.count(secrets.randbits(62))  # not those of an earlier process with the same number


def is_there() -> bool:
    """Whether this system has what sharing needs: nameless files that another process can open."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK") and Path("/proc/self/fd").is_dir()


def choose(wanted: bool | None) -> bool:
    """Whether to share memory: as wanted, else as the environment says, else where it can be had."""
    word = os.environ.get(SWITCH, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={word!r} must be 0, 1 or not set")
    if wanted is None and word:
        wanted = word == "1"
    if wanted and not is_there():
        raise Unavailable(f"shared memory needs memfd_create and /proc, as on Linux. Unset {SWITCH}.")
    return is_there() if wanted is None else wanted


def fence() -> None:
    """Let no read or write before this be mixed with one after it, as other processors see them.

    Arm processors may reorder what Python wrote in order. To release a lock and then take one is a full
    barrier on every processor: nothing moves down past a release or up past an acquire, and these two keep
    their order. The lock is fresh, so that this never waits, not even in a finalizer.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def layout(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """Where each part begins in memory that holds them all, and the bytes that all take."""
    offsets, end = [], 0
    for dtype, elements in shapes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + dtype.itemsize * elements
    return offsets, end


class Memory:
    """A nameless file, mapped. `close` closes the file; the mapping lasts as long as anything looks at it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes  # of the contents
        self._bytes = _map(fd, HEAD_BYTES + nbytes)
        self.words = self._bytes[:HEAD_BYTES].numpy().data.cast("Q")
        own(self)

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        """Fresh memory. Raises OSError if the system has not that much."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Now, where it is an error: a page that is missing later ends the process. And twice as fast.
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
    def attach(cls, pid: int, fd: int, serial: int, most_bytes: int) -> Memory:
        """What a process made under that number. Raises WireError unless it is that, and not too large."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            target = os.readlink(path)  # noqa: PTH115 - before it is opened: that alone may do something
            if not target.startswith(f"/memfd:{_NAME} "):
                raise WireError(f"it speaks of memory in its file {fd}, which is {target}")
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(f"the memory it speaks of cannot be opened: {error}") from error
        try:
            return cls._mapped(handle, serial, most_bytes)
        except BaseException:
            os.close(handle)
            raise

    @classmethod
    def _mapped(cls, handle: int, serial: int, most_bytes: int) -> Memory:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise WireError("the memory it speaks of belongs to somebody else")
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError("the memory it speaks of may shrink under its readers")
        if not HEAD_BYTES <= found.st_size <= HEAD_BYTES + most_bytes:
            raise WireError(
                f"the memory it speaks of has {found.st_size:,} bytes, the limit is {most_bytes:,}"
            )
        memory = cls(handle, found.st_size - HEAD_BYTES)
        if memory.words[_MAGIC] != _MARK or memory.serial != serial:
            raise WireError(f"the memory it speaks of is not number {serial}, but {memory.serial}")
        return memory

    @property
    def serial(self) -> int:
        """Its number among all that its maker made."""
        return self.words[_SERIAL]

    @property
    def retired(self) -> bool:
        """Whether its maker uses it no more."""
        return self.words[_RETIRED] != 0

    def tensors(
        self, shapes: Sequence[Shape], offset: int = 0, then: Callable[[], object] | None = None
    ) -> tuple[Tensor, ...]:
        """Flat views on the contents, laid out from `offset` on. Raises WireError if they do not fit.

        `then` is called when the last storage over them is gone. It may run at any allocation, in any
        thread: it must not wait for a lock that others take.
        """
        starts, length = layout(shapes)
        if offset + length > self.nbytes:
            raise WireError(f"{length:,} bytes at {offset:,} do not fit memory of {self.nbytes:,}")
        export = self._bytes.numpy()  # a new object each time; the storages hold on to it
        if then is not None:
            weakref.finalize(export, _call_at_home, os.getpid(), then).atexit = False
        return tuple(
            _view(export, dtype, elements, HEAD_BYTES + offset + start)
            for (dtype, elements), start in zip(shapes, starts, strict=True)
        )

    def retire(self) -> None:
        """Tell whoever has mapped it that nothing new comes in it, and close the file."""
        self.words[_RETIRED] = 1
        self.close()

    def close(self) -> None:
        """Close the file, so that nobody else can open it. Closing twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Shown(Protocol):
    """What a process says of its probe. `pid` 0: it shares no memory."""

    @property
    def pid(self) -> int:
        """The number of that process."""
        ...

    @property
    def fd(self) -> int:
        """The number of its open file."""
        ...

    @property
    def serial(self) -> int:
        """The number of the memory in that file."""
        ...


class Probe:
    """Memory for others to try: whether they can map it tells whether they can map all that we make."""

    def __init__(self, share: bool) -> None:
        self._memory = Memory.create(0) if share else None

    @property
    def shares(self) -> bool:
        """Whether this process shares memory at all."""
        return self._memory is not None

    @property
    def where(self) -> tuple[int, int, int]:
        """What to show others: the numbers of this process, of the file and of the memory."""
        return NOWHERE if self._memory is None else (os.getpid(), self._memory.fd, self._memory.serial)

    def sharing_pid(self, theirs: Shown) -> int:
        """The process at the other end if its memory can be mapped here, else 0."""
        if self._memory is None or theirs.pid <= 0:
            return 0
        try:
            Memory.attach(theirs.pid, theirs.fd, theirs.serial, self._memory.nbytes).close()
        except (WireError, OSError):
            return 0
        return theirs.pid

    def retire(self) -> None:
        """Take it away; nobody can try it any more."""
        if self._memory is not None:
            self._memory.retire()


def _map(fd: int, nbytes: int) -> Tensor:
    try:  # by torch, which needs no file of its own afterwards; Python's mmap keeps one
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{nbytes:,} bytes cannot be mapped: {error}") from error


def _call_at_home(pid: int, then: Callable[[], object]) -> None:
    if os.getpid() == pid:  # a forked child has copies of our objects; that they die means nothing
        then()


def _view(export: npt.NDArray[np.uint8], dtype: torch.dtype, elements: int, offset: int) -> Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize:
        raise WireError(f"{dtype} cannot begin at byte {offset}")
    return torch.frombuffer(export, dtype=dtype, count=elements, offset=offset)
