"""GpuMemory: memory of a GPU that other processes of this host map (CUDA IPC).

Its handle lies in an ordinary shared memory, through whose words the processes synchronise as for large
messages in host memory. A process says which GPU it is on in the first large message that it receives, and
its sender uses memory of that GPU from the next one on.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.transports.frames import Shape
from shoal.transports.shared_memory.memory import (
    GPU,
    HAS_GPU,
    UNMAPPED,
    SharedMemory,
    call_in_creator,
    fence,
    layout,
)

SWITCH = "SHOAL_GPU_MEMORY"
"""Environment variable: 0 sends tensors on a GPU through host memory."""

_CARD = struct.Struct("<64s16sQ")  # in the shared memory: the handle, the GPU, and the bytes of the memory
CARD_BYTES = _CARD.size


def uses_gpu() -> bool:
    """Whether this process uses CUDA."""
    cuda: Any = torch.cuda  # torch's stubs lack types here
    return bool(cuda.is_initialized())


def own_gpu() -> int | None:
    """The GPU that this thread computes on by default; None in a process that does not use CUDA."""
    return torch.cuda.current_device() if uses_gpu() else None


def has_bindings() -> bool:
    """Whether NVIDIA's bindings of CUDA for Python are installed."""
    return _runtime() is not None


def is_supported() -> bool:
    """Whether this process uses CUDA, and may and can share its memory."""
    return uses_gpu() and os.environ.get(SWITCH, "1") != "0" and has_bindings()


def uuid_of(device: torch.device | int) -> bytes:
    """What tells a GPU apart from all others, whatever number a process gives it."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def announce(memory: SharedMemory, gpu: int) -> None:
    """Write into the memory of a sender which GPU this process is on, and can map memory of."""
    if is_supported():
        memory.words[GPU], memory.words[GPU + 1] = struct.unpack("<2Q", uuid_of(gpu))
        fence()
        memory.words[HAS_GPU] = 1


def announced(memory: SharedMemory) -> bytes | None:
    """The GPU whose memory the receiver can map; None if it has not said so."""
    if not memory.words[HAS_GPU]:
        return None
    fence()
    return struct.pack("<2Q", memory.words[GPU], memory.words[GPU + 1])


class GpuMemory:
    """Memory of this process on a GPU. It is freed with the last tensor that views it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        with torch.cuda.device(device):
            self._pointer = _checked("cudaMalloc", nbytes)
            weakref.finalize(self, _quietly, "cudaFree", self._pointer).atexit = False
            handle = _checked("cudaIpcGetMemHandle", self._pointer)
        self.card = _CARD.pack(bytes(handle.reserved), uuid_of(device), nbytes)

    def tensors(self, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """Flat views on the memory, one after the other."""
        return _views(self, int(self._pointer), self.device, shapes, None)


class MappedGpuMemory:
    """Memory that another process has on a GPU, mapped here. Unmapped with the last tensor that views it.

    Its owner must not free it before, and finds out in the words of the `memory` that holds its card.
    """

    def __init__(self, memory: SharedMemory) -> None:
        (card,) = memory.tensors([(torch.uint8, CARD_BYTES)])
        handle, gpu, self.nbytes = _CARD.unpack(card.numpy().tobytes())
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
        weakref.finalize(self, _unmap, os.getpid(), self._pointer, memory.words).atexit = False

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
        weakref.finalize(export, call_in_creator, os.getpid(), then).atexit = False
    base = torch.as_tensor(export, device=device)
    return tuple(
        base[start : start + dtype.itemsize * elements].view(dtype)
        for (dtype, elements), start in zip(shapes, starts, strict=True)
    )


def _when_done(device: torch.device, then: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # CUDA has ended with this process: then nobody may write there
        torch.cuda.synchronize(device)
        then()


def _unmap(pid: int, pointer: Any, words: memoryview) -> None:
    if os.getpid() == pid:  # not in a forked child
        _quietly("cudaIpcCloseMemHandle", pointer)
        fence()
        words[UNMAPPED] = 1


def pin(memory: SharedMemory, gpu: int) -> None:
    """Let GPUs copy to and from host memory directly, at several times the speed; nothing if that fails.

    By NVIDIA's bindings, since a failure in torch's own runtime would show up in a later kernel.
    """
    if memory.is_pinned or not has_bindings():
        return
    memory.is_pinned = True  # or not: it is tried once
    mapping = memory.mapping
    with torch.cuda.device(gpu):
        (status,) = _runtime().cudaHostRegister(mapping.data_ptr(), mapping.nbytes, 0)
    if int(status) == 0:
        weakref.finalize(mapping, _quietly, "cudaHostUnregister", mapping.data_ptr()).atexit = False


_lock = threading.Lock()
_given_up: list[tuple[GpuMemory, memoryview, int]] = []  # that may be mapped: by whom, and where it would say


def give_up(memory: GpuMemory, words: memoryview, pid: int) -> None:
    """Free memory of this process once the one that maps it has unmapped it, or has ended."""
    with _lock:
        _given_up.append((memory, words, pid))
        _given_up[:] = [each for each in _given_up if not each[1][UNMAPPED] and _is_alive(each[2])]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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
