"""Large messages between two processes of one host: written once into memory that both have mapped.

That is host memory or, for tensors on a GPU whose memory the receiver can map, memory of that GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import MOST_PARTS
from shoal.transports.frames import (
    GPU_MESSAGE,
    LARGE_MESSAGE,
    LOCATION_BYTES,
    MAGIC,
    SHARED_MAGIC,
    MemoryLocation,
    Shape,
    decode_location,
    encode_location,
)
from shoal.transports.shared_memory import gpu_memory
from shoal.transports.shared_memory.gpu_memory import CARD_BYTES, GpuMemory, MappedGpuMemory
from shoal.transports.shared_memory.memory import ALIGNMENT, FREED, SharedMemory, fence, layout

SMALLEST_SHARED = 64 * 1024
"""Below this many bytes the connection is faster."""

MOST_BUFFERS = 16
"""Buffers per peer, whatever their size."""

IDLE_SENDS = 64
"""A buffer that this many sends did not use is released."""

_MOST_MAPPED = 64


def capacity(nbytes: int) -> int:
    """Bytes of the buffer for a message of `nbytes`: at most an eighth more, so that similar ones fit."""
    step = max(SMALLEST_SHARED, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def largest(limit_bytes: int) -> int:
    """Bytes of the largest shared memory that a peer may offer if no message exceeds `limit_bytes`."""
    return capacity(limit_bytes + MOST_PARTS * ALIGNMENT)


class SendBuffers:
    """The shared buffers of one sender for one receiver. They are few, and stay mapped at both ends.

    Together they take at most twice the largest message, and as much on a GPU. A buffer is free again when
    the receiver's tensors over it are gone.
    """

    def __init__(self, limit_bytes: int, pid: int) -> None:
        self._most_bytes = 2 * largest(limit_bytes)
        self._pid = pid  # of the receiver
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._sends = 0
        self._closed = False
        self._their_gpu: bytes | None = None  # whose memory the receiver can map
        self._shares_gpu = True  # until memory of a GPU cannot be had, or not be shared

    def wrap(self, header: bytes, parts: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
        """Move a large message into a free buffer, which its new header names; else return it unchanged."""
        if sum(part.nbytes for part in parts) < SMALLEST_SHARED:
            return header, parts
        location = self.write(parts)
        return (header, parts) if location is None else (encode_location(header, location), ())

    def write(self, parts: Sequence[Tensor]) -> MemoryLocation | None:
        """Copy the parts into a free buffer and return its location; None if there is none."""
        shapes = [(part.dtype, part.numel()) for part in parts]
        nbytes, gpu = layout(shapes)[1], self._shared_gpu(parts)
        with self._lock:
            buffer = self._take(nbytes, gpu) or (None if gpu is None else self._take(nbytes, None))
            if buffer is None:
                return None
            buffer.number += 1
        fence()  # the receiver's last reads before our writes
        return buffer.write(shapes, parts)

    def close(self) -> None:
        """Release all buffers. Tensors at the receiver stay valid through its own mapping."""
        with self._lock:
            self._closed = True
            self._retire(list(self._buffers))

    def _shared_gpu(self, parts: Sequence[Tensor]) -> torch.device | None:
        """The GPU on which all parts are, if the receiver can map its memory."""
        devices = {part.device for part in parts}
        able = self._shares_gpu and len(devices) == 1 and parts[0].is_cuda
        if not able or not gpu_memory.is_supported():
            return None
        if self._their_gpu is None:
            with self._lock:
                told = (gpu_memory.announced(buffer.memory) for buffer in self._buffers)
                self._their_gpu = next(filter(None, told), None)
        (device,) = devices
        return device if gpu_memory.uuid_of(device) == self._their_gpu else None

    def _take(self, nbytes: int, gpu: torch.device | None) -> _Buffer | None:
        if self._closed:
            return None
        self._sends += 1
        free = [buffer for buffer in self._buffers if buffer.is_free() and buffer.gpu == gpu]
        fitting = [buffer for buffer in free if buffer.nbytes >= nbytes]
        chosen = min(fitting, key=lambda buffer: buffer.nbytes, default=None)
        if chosen is not None:
            chosen.used = self._sends
            idle = [buffer for buffer in self._buffers if buffer.used < self._sends - IDLE_SENDS]
            self._retire([buffer for buffer in idle if buffer.is_free()])
            return chosen
        room = capacity(nbytes)
        while free and not self._has_room(room, gpu):
            self._retire([free.pop(0)])
        return self._add(room, gpu) if self._has_room(room, gpu) else None

    def _has_room(self, nbytes: int, gpu: torch.device | None) -> bool:
        beside = [buffer.nbytes for buffer in self._buffers if buffer.gpu == gpu]
        return len(beside) < MOST_BUFFERS and sum(beside) + nbytes <= self._most_bytes

    def _add(self, nbytes: int, gpu: torch.device | None) -> _Buffer | None:
        try:
            buffer = _Buffer(nbytes, gpu, self._sends)
        except OSError:  # no memory or too many open files: use the host's, or the connection
            self._shares_gpu = self._shares_gpu and gpu is None
            return None
        self._buffers.append(buffer)
        return buffer

    def _retire(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            self._buffers.remove(buffer)
            buffer.retire(self._pid)


class _Buffer:
    """Memory that holds one message at a time: of the host, or of a GPU."""

    def __init__(self, nbytes: int, gpu: torch.device | None, used: int) -> None:
        self.nbytes = nbytes
        self.gpu = gpu
        self._on_gpu = None if gpu is None else GpuMemory(nbytes, gpu)
        self.memory = SharedMemory.create(nbytes if self._on_gpu is None else CARD_BYTES)
        if self._on_gpu is not None:
            (card,) = self.memory.tensors([(torch.uint8, CARD_BYTES)])
            card.copy_(torch.frombuffer(bytearray(self._on_gpu.card), dtype=torch.uint8))
        self.used = used  # number of the last send that used it
        self.number = 0  # of its latest message

    def is_free(self) -> bool:
        return self.memory.words[FREED] == self.number

    def retire(self, pid: int) -> None:
        """It is not used again; the process `pid` may still have it mapped."""
        self.memory.retire()
        if self._on_gpu is not None:
            gpu_memory.give_up(self._on_gpu, self.memory.words, pid)

    def write(self, shapes: Sequence[Shape], parts: Sequence[Tensor]) -> MemoryLocation:
        """Copy the parts into it, and wait until they are there."""
        if self._on_gpu is None and self.number > 1 and parts[0].is_cuda:  # it costs as much as ten copies
            gpu_memory.pin(self.memory, parts[0].get_device())
        targets = self.memory if self._on_gpu is None else self._on_gpu
        for target, part in zip(targets.tensors(shapes), parts, strict=True):
            target.copy_(part)
        if self.gpu is not None:
            torch.cuda.current_stream(self.gpu).synchronize()
        kind = LARGE_MESSAGE if self.gpu is None else GPU_MESSAGE
        return MemoryLocation(kind, self.memory.fd, self.memory.serial, number=self.number)


class Mappings:
    """The memory of one peer that this process has mapped."""

    def __init__(self, pid: int, limit_bytes: int, gpu: int | None = None) -> None:
        self._pid = pid
        self._most_bytes = largest(limit_bytes)
        self._gpu = gpu  # on which this process is, if the peer may send memory of it
        self._mapped: dict[int, SharedMemory] = {}
        self._on_gpus: dict[int, MappedGpuMemory] = {}

    def read(self, location: MemoryLocation, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """The parts of a large message: views on the sender's buffer, which is free again once they die."""
        memory = self.at(location)
        then = _freeing(memory, location.number)
        if location.kind == LARGE_MESSAGE:
            if self._gpu is not None and location.number > 1:
                gpu_memory.pin(memory, self._gpu)
            return memory.tensors(shapes, location.offset, then)
        if location.serial not in self._on_gpus:
            self._on_gpus[location.serial] = MappedGpuMemory(memory)
        return self._on_gpus[location.serial].tensors(shapes, then)

    def at(self, location: MemoryLocation) -> SharedMemory:
        """The memory at `location`. Raises WireError if it is not what the location says."""
        for serial, memory in list(self._mapped.items()):
            if memory.retired:
                self._unmap(serial)
        if location.serial not in self._mapped:
            while len(self._mapped) >= _MOST_MAPPED:
                self._unmap(next(iter(self._mapped)))
            self._mapped[location.serial] = memory = self.open(location)
            memory.close()
            if self._gpu is not None and location.kind == LARGE_MESSAGE:
                gpu_memory.announce(memory, self._gpu)
        return self._mapped[location.serial]

    def clear(self) -> None:
        """Unmap everything; tensors that view it stay valid."""
        self._mapped.clear()
        self._on_gpus.clear()

    def _unmap(self, serial: int) -> None:
        del self._mapped[serial]
        self._on_gpus.pop(serial, None)

    def open(self, location: MemoryLocation) -> SharedMemory:
        """The same, not cached and with its file open; the caller closes it."""
        return SharedMemory.attach(self._pid, location.fd, location.serial, self._most_bytes)


class LargeMessages:
    """Large messages to and from one peer. Each direction works, or does not, independently.

    The caller must not run `read` and `close` at the same time.
    """

    def __init__(self, pid: int, limit_bytes: int, *, is_mapped: bool = False) -> None:
        self.pid = pid  # of the peer, if its memory can be mapped here; else 0
        self.is_mapped = is_mapped  # whether the peer can map memory of this process
        self._send_buffers = SendBuffers(limit_bytes, pid)
        self._mappings = Mappings(pid, limit_bytes)

    def wrap(self, header: bytes, parts: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
        """As SendBuffers.wrap; returns the message unchanged if the peer cannot map our memory."""
        return self._send_buffers.wrap(header, parts) if self.is_mapped else (header, parts)

    def open(
        self, header: memoryview | bytes, rest: memoryview
    ) -> tuple[memoryview | bytes, MemoryLocation | None, memoryview]:
        """Undo `wrap`: the ordinary header, the location of the parts if they are shared, and the rest.

        Raises WireError for an invalid location, or if no memory is shared.
        """
        if bytes(header[: len(SHARED_MAGIC)]) != SHARED_MAGIC:
            return header, None, rest
        if not self.pid:
            raise WireError("it refers to shared memory, but none was agreed on")
        if len(rest) != LOCATION_BYTES:
            raise WireError(f"a memory location has {LOCATION_BYTES} bytes, got {len(rest)}")
        location = decode_location(rest)
        if location.kind != LARGE_MESSAGE:
            raise WireError(f"memory location of kind {location.kind}, only {LARGE_MESSAGE} is allowed here")
        return MAGIC + bytes(header[len(MAGIC) :]), location, rest[LOCATION_BYTES:]

    def read(self, location: MemoryLocation, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """The parts at `location`. Raises WireError if that is not memory of the peer."""
        return self._mappings.read(location, shapes)

    def close(self) -> None:
        """Release all memory; tensors that view it stay valid."""
        self._send_buffers.close()
        self._mappings.clear()


def _freeing(memory: SharedMemory, number: int) -> Callable[[], None]:
    # Runs in a finalizer, anywhere: writing to memory is safe there, writing to a socket is not.
    return partial(_free, memory.words, number)


def _free(words: memoryview, number: int) -> None:
    fence()  # our reads before the word that allows overwriting
    words[FREED] = number
