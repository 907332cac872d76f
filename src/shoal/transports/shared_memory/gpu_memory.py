"""GpuMemory: memory of a GPU that other processes of this host map (CUDA IPC).

Its handle lies in an ordinary shared memory, through whose words the processes synchronise as for large
messages in host memory. A process says which GPUs it sees in the first large message that it receives, and
its sender uses their memory from the next one on.
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.transports.frames import Shape
from shoal.transports.shared_memory.memory import SharedMemory, fence, layout

SWITCH = "SHOAL_GPU_MEMORY"
"""Environment variable: 0 sends tensors on a GPU through host memory."""

_CARD = struct.Struct("<64s16sQ")  # in the shared memory: the handle, the GPU, and the bytes of the memory
CARD_BYTES = _CARD.size

_SEEN, _UUIDS = 5, 8  # words of the head: how many GPUs the receiver sees; from there on two words for each
MOST_GPUS = 64


def uses_gpu() -> bool:
    """Whether this process uses CUDA."""
    cuda: Any = torch.cuda  # torch's stubs lack types here
    return bool(cuda.is_initialized())


def has_bindings() -> bool:
    """Whether NVIDIA's bindings of CUDA for Python are installed."""
    return _runtime() is not None


def is_supported() -> bool:
    """Whether this process uses CUDA, and may and can share its memory."""
    return uses_gpu() and os.environ.get(SWITCH, "1") != "0" and has_bindings()


def uuid_of(device: torch.device | int) -> bytes:
    """What tells a GPU apart from all others, whatever number a process gives it."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def announce(memory: SharedMemory) -> None:
    """Write into the memory of a sender which GPUs this process can map memory of."""
    if not is_supported():
        return
    seen = [uuid_of(k) for k in range(min(MOST_GPUS, torch.cuda.device_count()))]
    for k, one in enumerate(seen):
        first, second = struct.unpack("<2Q", one)
        memory.words[_UUIDS + 2 * k], memory.words[_UUIDS + 2 * k + 1] = first, second
    fence()
    memory.words[_SEEN] = len(seen)


def announced(memory: SharedMemory) -> set[bytes]:
    """The GPUs whose memory the receiver can map, as far as it has said so."""
    seen = range(min(MOST_GPUS, memory.words[_SEEN]))
    fence()
    return {struct.pack("<2Q", *memory.words[_UUIDS + 2 * k : _UUIDS + 2 * k + 2]) for k in seen}


class GpuMemory:
    """Memory of this process on a GPU. It is freed with the last tensor that views it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        with torch.cuda.device(device):
            self._pointer = _checked("cudaMalloc", nbytes)
            handle = _checked("cudaIpcGetMemHandle", self._pointer)
        self.card = _CARD.pack(bytes(handle.reserved), uuid_of(device), nbytes)
        weakref.finalize(self, _quietly, "cudaFree", self._pointer).atexit = False

    def tensors(self, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """Flat views on the memory, one after the other."""
        return _views(self, int(self._pointer), self.device, shapes, None)


class MappedGpuMemory:
    """Memory that another process has on a GPU, mapped here. Unmapped with the last tensor that views it."""

    def __init__(self, card: bytes) -> None:
        handle, gpu, self.nbytes = _CARD.unpack(card)
        seen = {uuid_of(k): k for k in range(torch.cuda.device_count())} if is_supported() else {}
        if gpu not in seen:
            raise WireError("it refers to memory of a GPU that this process does not see")
        self.device = torch.device("cuda", seen[gpu])
        opened = _runtime().cudaIpcMemHandle_t()
        opened.reserved = handle
        try:
            with torch.cuda.device(self.device):
                self._pointer = _checked("cudaIpcOpenMemHandle", opened, _LAZY_PEER_ACCESS)
        except OSError as error:
            raise WireError(
                f"the GPU memory it refers to cannot be mapped: {error}. Set {SWITCH}=0."
            ) from error
        weakref.finalize(self, _quietly, "cudaIpcCloseMemHandle", self._pointer).atexit = False

    def tensors(self, shapes: Sequence[Shape], then: Callable[[], object]) -> tuple[Tensor, ...]:
        """Flat views on the memory. Calls `then` when the GPU has done all that used them and they are gone.

        Raises WireError if they do not fit.
        """
        length = layout(shapes)[1]
        if length > self.nbytes:
            raise WireError(f"{length:,} bytes do not fit GPU memory of {self.nbytes:,}")
        return _views(self, int(self._pointer), self.device, shapes, partial(_when_done, self.device, then))


_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class _Export:
    """What torch asks for to view memory that is not its own. It keeps that memory."""

    def __init__(self, owner: object, pointer: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _views(
    owner: object,
    pointer: int,
    device: torch.device,
    shapes: Sequence[Shape],
    then: Callable[[], object] | None,
) -> tuple[Tensor, ...]:
    starts, length = layout(shapes)
    export = _Export(owner, pointer, max(1, length))  # a new object each time; the storage references it
    if then is not None:
        weakref.finalize(export, then).atexit = False
    base = torch.as_tensor(export, device=device)
    return tuple(
        base[start : start + dtype.itemsize * elements].view(dtype)
        for (dtype, elements), start in zip(shapes, starts, strict=True)
    )


def _when_done(device: torch.device, then: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # CUDA has ended with this process
        torch.cuda.synchronize(device)
    then()


@cache
def _runtime() -> Any:
    """NVIDIA's bindings of the CUDA runtime, which torch brings along; None where they are missing."""
    try:
        from cuda.bindings import runtime  # type: ignore[import-not-found]
    except ImportError:
        return None
    return runtime


def _checked(name: str, *arguments: Any) -> Any:
    """The result of a call of the CUDA runtime. Raises OSError if it fails."""
    status, *results = getattr(_runtime(), name)(*arguments)
    if int(status):
        raise OSError(f"{name}: {status.name}")
    return results[0] if results else None


def _quietly(name: str, *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # CUDA ends before Python does
        getattr(_runtime(), name)(*arguments)
