"""Zero-copy reads: peers read a node's tensor in place, so that a pull is a single copy.

A reader never mistakes a half-updated tensor for a consistent one. Each read has two words in the shared
memory, each with one writer: the owner's word names the read that is allowed, the reader's word the read that
has finished.

    owner    revokes: clear its word;  fence;  only then change the contents
    reader   copies the contents;  fence;  checks the owner's word: the copy is valid if it names this read

Suppose the copy contains a byte of the change. The owner cleared its word before its fence, hence before the
change. The reader checks after its own fence, hence after the copy, so it sees the cleared word and discards
the copy. A reader that sees its own number copied everything before any change. No atomic swap is needed.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from shoal.core.errors import WireError
from shoal.transports.frames import SHARED_READ, SHOWN, MemoryLocation, Shape
from shoal.transports.shared_memory.memory import HEAD_BYTES, REVISION, SLOTS, SharedMemory, fence

_SPINS = 200
_LONGEST_PAUSE = 200e-6
_MOST_SLOTS = (HEAD_BYTES // 8 - SLOTS) // 2


class SharedReads:
    """The tensors that this node shares, and the reads of them under way. For use by one thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by the address of the storage
        self._dropped: deque[int] = deque()  # addresses of dead storages; a finalizer may append
        self._lingering: list[_Block] = []  # dead, but perhaps still read
        self._reads: list[_Read] = []
        self._numbers = itertools.count(1)

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like` in memory that peers can map. Raises OSError if the system has not enough."""
        self._forget_dropped()
        memory = SharedMemory.create(like.nbytes)
        try:
            address: list[int] = []
            shape = (like.dtype, like.numel())
            (flat,) = memory.tensors([shape], then=partial(self._dropped.extend, address))
            address.append(flat.untyped_storage().data_ptr())
            shared = flat.view(like.shape)
            shared.copy_(like.detach())
        except BaseException:
            memory.retire()
            raise
        self._blocks[address[0]] = _Block(memory)
        return shared

    def lend(self, part: Tensor, gone: Callable[[], bool]) -> MemoryLocation | None:
        """Allow one read of `part`; None if all slots are used, so that it must be copied.

        `gone` says whether the reader is lost. Raises ValueError if `part` is not in shared memory.
        """
        block, offset = self._find(part)
        if not block.free_slots:
            return None
        read = _Read(block, block.free_slots.pop(), next(self._numbers), gone)
        block.memory.words[_owner_word(read.slot)] = read.number
        self._reads.append(read)
        memory = block.memory
        return MemoryLocation(SHARED_READ, memory.fd, memory.serial, offset, read.slot, read.number)

    def show(self, part: Tensor) -> MemoryLocation:
        """Where peers find `part`, to read it as often as they like. Raises ValueError as `lend` does."""
        block, offset = self._find(part)
        memory = block.memory
        return MemoryLocation(SHOWN, memory.fd, memory.serial, offset, number=memory.words[REVISION])

    def revise(self, part: Tensor) -> None:
        """Let readers of shown memory know that it changes from now on."""
        block, _ = self._find(part)
        block.memory.words[REVISION] += 1
        fence()  # our word before our changes

    def reclaim(self, seconds: float) -> None:
        """Wait until all reads have finished, at most `seconds`; then revoke the rest."""
        self._forget_dropped()
        deadline = time.monotonic() + seconds
        looks, pause = 0, 10e-6
        while self._reads:
            self._reads = [read for read in self._reads if not read.is_finished()]
            looks += 1
            if time.monotonic() >= deadline:
                break
            if looks > _SPINS and self._reads:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        for read in self._reads:
            read.revoke()
        self._reads.clear()
        fence()  # our words before our changes, and the readers' reads before them

    def close(self) -> None:
        """Revoke all reads and release the memory."""
        self.reclaim(0.0)
        for block in (*self._blocks.values(), *self._lingering):
            block.memory.retire()
        self._blocks.clear()
        self._lingering.clear()

    def _find(self, part: Tensor) -> tuple[_Block, int]:
        """The block that holds `part`, and where in it. Raises ValueError if it is not in shared memory."""
        storage = part.untyped_storage().data_ptr()
        block = self._blocks.get(storage)
        if block is None or not part.is_contiguous():
            raise ValueError(
                "only a contiguous tensor that came from share() can be read in place; use send()"
            )
        return block, part.data_ptr() - storage

    def _forget_dropped(self) -> None:
        while self._dropped:
            block = self._blocks.pop(self._dropped.popleft(), None)
            if block is not None:
                self._lingering.append(block)
        for block in [block for block in self._lingering if block.is_idle()]:
            self._lingering.remove(block)
            block.memory.retire()


@dataclass(eq=False)
class _Block:
    """One shared tensor, and the free slots in its head."""

    memory: SharedMemory
    free_slots: list[int] = field(default_factory=lambda: list(range(_MOST_SLOTS)))

    def is_idle(self) -> bool:
        """Whether no reader will open the file any more. One whose read was revoked still may."""
        return len(self.free_slots) == _MOST_SLOTS


@dataclass(eq=False)
class _Read:
    """One read, as the owner sees it."""

    block: _Block
    slot: int
    number: int
    gone: Callable[[], bool]  # whether the reader is lost

    def is_finished(self) -> bool:
        """Whether the reader has finished, which frees the slot, or is lost."""
        if self.block.memory.words[_reader_word(self.slot)] == self.number:
            self.block.free_slots.append(self.slot)
            return True
        if self.gone():
            self.revoke()  # the reader may be alive, but disconnected
            return True
        return False

    def revoke(self) -> None:
        """Make the reader's check fail.

        The slot is never used again: a reader that has just checked may still write its word, and would
        overwrite that of the slot's next reader.
        """
        self.block.memory.words[_owner_word(self.slot)] = 0


class ZeroCopyRead:
    """One read, as the reader sees it. Calling it ends the read; True if the contents were consistent."""

    def __init__(self, memory: SharedMemory, location: MemoryLocation) -> None:
        if not 0 <= location.slot < _MOST_SLOTS:
            raise WireError(f"a shared read in slot {location.slot}, of {_MOST_SLOTS}")
        self._words = memory.words
        self._slot = location.slot
        self._number = location.number
        self._consistent: bool | None = None

    def __call__(self) -> bool:
        if self._consistent is None:
            fence()  # the copy before the check
            self._consistent = self._words[_owner_word(self._slot)] == self._number
            if self._consistent:
                self._words[_reader_word(self._slot)] = self._number
        return self._consistent


class ShownMemory:
    """Memory of a peer that this node reads once a revision. Call it after a read; True if consistent.

    The proof is that of a read above: who has copied a byte of the next revision sees that it was counted.
    """

    def __init__(self, memory: SharedMemory, revision: int) -> None:
        self._words = memory.words
        self._revision = revision  # that was read last

    def __call__(self) -> bool:
        fence()  # the copy before the check
        self._revision += 1
        return self._words[REVISION] == self._revision


def start_read(
    memory: SharedMemory, location: MemoryLocation, shapes: Sequence[Shape]
) -> tuple[tuple[Tensor, ...], ZeroCopyRead]:
    """The lent parts, read-only, and what to call after read. Dropping all parts ends the read too."""
    read = ZeroCopyRead(memory, location)
    return memory.tensors(shapes, location.offset, read), read


def _owner_word(slot: int) -> int:
    """Index of the owner's word: the number of the read, 0 once revoked."""
    return SLOTS + 2 * slot


def _reader_word(slot: int) -> int:
    """Index of the reader's word: the number of its last finished read."""
    return SLOTS + 2 * slot + 1
