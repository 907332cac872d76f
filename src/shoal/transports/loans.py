"""Loans: memory of one node that others read in place, so that a pull is one copy.

How a reader can never take half an update for a whole one. A loan has two words, each with one writer:
the lender's says which loan the memory is lent for, the reader's which loan it has done with.

    lender   takes back: clear its word;  fence;  only then change the contents
    reader   copies the contents;  fence;  looks at the lender's word: if it names this loan, all is well

Suppose a copy holds a byte of the change. The change came after the fence of the lender, so its word was
cleared before; the reader looks after its own fence, which comes after the copy, so it sees the word cleared
and knows that the copy is worthless. A reader that sees the word uncleared has copied before any change, and
what the lender does from then on does not matter. No exchange of words in one step is needed.
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
from shoal.transports.frames import LOAN, Place, Shape
from shoal.transports.memory import HEAD_BYTES, SLOTS, Memory, fence

_SPINS = 200
_LONGEST_PAUSE = 200e-6
_MOST_SLOTS = (HEAD_BYTES // 8 - SLOTS) // 2


class Lender:
    """What this node shares, and who reads it. To be used by one thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by the address of the storage
        self._dropped: deque[int] = deque()  # storages that are gone; appending is safe in a finalizer
        self._lingering: list[_Block] = []  # dropped, but perhaps still read
        self._loans: list[_Loan] = []
        self._numbers = itertools.count(1)

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like` in memory that peers can map. Raises OSError if the system has none."""
        self._forget_dropped()
        memory = Memory.create(like.nbytes)
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

    def lend(self, part: Tensor, gone: Callable[[], bool]) -> Place | None:
        """Open a loan to a reader that `gone` tells about; None if it has to be copied.

        Raises ValueError for what is not in shared memory.
        """
        storage = part.untyped_storage().data_ptr()
        block = self._blocks.get(storage)
        if block is None or not part.is_contiguous():
            raise ValueError("only a contiguous tensor that came from share() can be lent; use send()")
        if not block.free_slots:
            return None
        loan = _Loan(block, block.free_slots.pop(), next(self._numbers), gone)
        block.memory.words[_lent(loan.slot)] = loan.number
        self._loans.append(loan)
        memory = block.memory
        return Place(LOAN, memory.fd, memory.serial, part.data_ptr() - storage, loan.slot, loan.number)

    def reclaim(self, seconds: float) -> None:
        """Wait until nobody reads, at most so many seconds; who still reads then will not believe it."""
        self._forget_dropped()
        deadline = time.monotonic() + seconds
        looks, pause = 0, 10e-6
        while self._loans:
            self._loans = [loan for loan in self._loans if not loan.is_over()]
            looks += 1
            if time.monotonic() >= deadline:
                break
            if looks > _SPINS and self._loans:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        for loan in self._loans:
            loan.take_back()
        self._loans.clear()
        fence()  # words before contents, and the readers' reads before our writes

    def close(self) -> None:
        """Take everything back and let go of it."""
        self.reclaim(0.0)
        for block in (*self._blocks.values(), *self._lingering):
            block.memory.retire()
        self._blocks.clear()
        self._lingering.clear()

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
    """One piece of shared memory, and the places in its head where loans of it are noted."""

    memory: Memory
    free_slots: list[int] = field(default_factory=lambda: list(range(_MOST_SLOTS)))

    def is_idle(self) -> bool:
        """Whether nobody will open the file any more; a reader that was too slow still may."""
        return len(self.free_slots) == _MOST_SLOTS


@dataclass(eq=False)
class _Loan:
    """One loan, as its lender sees it."""

    block: _Block
    slot: int
    number: int
    gone: Callable[[], bool]  # whether the reader is

    def is_over(self) -> bool:
        """Whether the reader has done with it, which frees its slot, or is gone."""
        if self.block.memory.words[_done(self.slot)] == self.number:
            self.block.free_slots.append(self.slot)
            return True
        if self.gone():
            self.take_back()  # it may live on, cut off from us
            return True
        return False

    def take_back(self) -> None:
        """Have the reader know, when it looks, that what it read is worthless.

        Its slot is never used again: a reader that has just looked may yet write its word, and that of
        another reader there would be lost.
        """
        self.block.memory.words[_lent(self.slot)] = 0


class Reading:
    """One loan, as its reader sees it. To call it ends the loan and tells whether the contents were whole."""

    def __init__(self, memory: Memory, place: Place) -> None:
        if not 0 <= place.slot < _MOST_SLOTS:
            raise WireError(f"a loan in slot {place.slot}, of {_MOST_SLOTS}")
        self._words = memory.words
        self._slot = place.slot
        self._number = place.number
        self._whole: bool | None = None

    def __call__(self) -> bool:
        if self._whole is None:
            fence()  # the copy, then the look at the lender's word
            self._whole = self._words[_lent(self._slot)] == self._number
            if self._whole:
                self._words[_done(self._slot)] = self._number
        return self._whole


def borrow(memory: Memory, place: Place, shapes: Sequence[Shape]) -> tuple[tuple[Tensor, ...], Reading]:
    """The lent parts, to be read only, and what to call once they are read. Dropping them all ends it too."""
    reading = Reading(memory, place)
    return memory.tensors(shapes, place.offset, reading), reading


def _lent(slot: int) -> int:
    """Word of the lender: the number of the loan, 0 once it is taken back."""
    return SLOTS + 2 * slot


def _done(slot: int) -> int:
    """Word of the reader: the number of the last loan it has done with."""
    return SLOTS + 2 * slot + 1
