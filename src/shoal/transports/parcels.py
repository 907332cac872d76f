"""Parcels: large messages between two processes, written once into memory that both have mapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from shoal.core.transport import MOST_PARTS
from shoal.transports.frames import PARCEL, Place, Shape, encode_elsewhere
from shoal.transports.memory import ALIGNMENT, FREED, Memory, fence, layout

SMALLEST = 64 * 1024
"""Below this many bytes a message goes over the connection faster."""

MOST_BUFFERS = 16
"""Buffers for one peer, however small they are."""

IDLE_SENDS = 64
"""A buffer that so many sends did without goes back to the system."""

_MOST_MAPPED = 64


def capacity(nbytes: int) -> int:
    """Bytes of a buffer for a message of `nbytes`: an eighth more at most, so that the next fits as well."""
    step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def largest(limit_bytes: int) -> int:
    """Bytes of the largest memory that a node may show to others when no message exceeds the limit."""
    return capacity(limit_bytes + MOST_PARTS * ALIGNMENT)


class Outbox:
    """The buffers of one sender for one receiver. They are few, and stay mapped at both ends.

    All of them together take no more than twice the largest message, so memory is bounded by what is
    under way. A buffer is free again when the receiver's tensors over it are gone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._most_bytes = 2 * largest(limit_bytes)
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._sends = 0
        self._closed = False

    def wrap(self, header: bytes, parts: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
        """The same message for the connection: of one that could be packed, a header that says where."""
        if sum(part.nbytes for part in parts) < SMALLEST:
            return header, parts
        place = self.pack(parts)
        return (header, parts) if place is None else (encode_elsewhere(header, place), ())

    def pack(self, parts: Sequence[Tensor]) -> Place | None:
        """Copy the parts into a free buffer and say where; None when there is none to be had now."""
        shapes = [(part.dtype, part.numel()) for part in parts]
        with self._lock:
            buffer = self._take(layout(shapes)[1])
            if buffer is None:
                return None
            buffer.number += 1
        fence()  # the receiver's last reads before our writes
        memory = buffer.memory
        for target, part in zip(memory.tensors(shapes), parts, strict=True):
            target.copy_(part)
        return Place(PARCEL, memory.fd, memory.serial, number=buffer.number)

    def close(self) -> None:
        """Give all buffers back. What the receiver still looks at stays alive by its own mapping."""
        with self._lock:
            self._closed = True
            for buffer in self._buffers:
                buffer.memory.retire()
            self._buffers.clear()

    def _take(self, nbytes: int) -> _Buffer | None:
        if self._closed:
            return None
        self._sends += 1
        free = [buffer for buffer in self._buffers if buffer.is_free()]
        fitting = [buffer for buffer in free if buffer.memory.nbytes >= nbytes]
        chosen = min(fitting, key=lambda buffer: buffer.memory.nbytes, default=None)
        if chosen is not None:
            chosen.used = self._sends
            free.remove(chosen)
            self._retire([buffer for buffer in free if buffer.used < self._sends - IDLE_SENDS])
            return chosen
        room = capacity(nbytes)
        while free and not self._has_room(room):
            self._retire([free.pop(0)])
        return self._add(room) if self._has_room(room) else None

    def _has_room(self, nbytes: int) -> bool:
        taken = sum(buffer.memory.nbytes for buffer in self._buffers)
        return len(self._buffers) < MOST_BUFFERS and taken + nbytes <= self._most_bytes

    def _add(self, nbytes: int) -> _Buffer | None:
        try:
            buffer = _Buffer(Memory.create(nbytes), self._sends)
        except OSError:  # no memory, or too many open files: the connection still works
            return None
        self._buffers.append(buffer)
        return buffer

    def _retire(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            self._buffers.remove(buffer)
            buffer.memory.retire()


class _Buffer:
    """Memory that holds one parcel at a time."""

    def __init__(self, memory: Memory, used: int) -> None:
        self.memory = memory
        self.used = used  # in which send
        self.number = 0  # of the parcel that it holds or held

    def is_free(self) -> bool:
        return self.memory.words[FREED] == self.number


class Mappings:
    """Memory of one peer, as this process has mapped it."""

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self._pid = pid
        self._most_bytes = largest(limit_bytes)
        self._mapped: dict[int, Memory] = {}

    def unpack(self, place: Place, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """The parts of a parcel: views on the sender's buffer, which is free again when they are gone."""
        memory = self.at(place)
        return memory.tensors(shapes, place.offset, _freeing(memory, place.number))

    def at(self, place: Place) -> Memory:
        """The memory of a place. Raises WireError if it is not what the place says."""
        for serial, memory in list(self._mapped.items()):
            if memory.retired:
                del self._mapped[serial]
        if place.serial not in self._mapped:
            while len(self._mapped) >= _MOST_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[place.serial] = self.open(place)
            self._mapped[place.serial].close()
        return self._mapped[place.serial]

    def clear(self) -> None:
        """Let go of everything; what tensors look at stays."""
        self._mapped.clear()

    def open(self, place: Place) -> Memory:
        """The same with a file of its own, which the caller closes."""
        return Memory.attach(self._pid, place.fd, place.serial, self._most_bytes)


def _freeing(memory: Memory, number: int) -> Callable[[], None]:
    # A finalizer may run anywhere: a write to memory is safe there, a write to a socket is not.
    return partial(_free, memory.words, number)


def _free(words: memoryview, number: int) -> None:
    fence()  # all that was read there before the word that lets it be overwritten
    words[FREED] = number
