"""Memory for incoming messages, used again once nobody looks at it any more."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from shoal.transports.frames import bytes_of

SMALLEST = 64 * 1024
"""Below this many bytes a fresh allocation costs less than looking for an old one."""

MOST_FREE = 8
"""Free buffers kept; beyond that the one idle longest goes back to the system."""


class BufferPool:
    """Hands out tensors over recycled memory. Safe to use from several threads.

    A buffer is free again when the storage over it dies, not the tensor: a slice that outlives its
    tensor keeps its memory.
    """

    def __init__(self) -> None:
        # Every operation on a deque is atomic. A lock would not do: a finalizer may run at any
        # allocation, also inside `_take`, and would then wait for its own thread.
        self._free: deque[Tensor] = deque(maxlen=MOST_FREE)

    def empty(self, dtype: torch.dtype, elements: int) -> tuple[Tensor, memoryview]:
        """A flat tensor with undefined contents, and its memory to write them into."""
        nbytes = dtype.itemsize * elements
        if nbytes < SMALLEST:
            fresh = torch.empty(elements, dtype=dtype)
            return fresh, bytes_of(fresh)
        memory = self._take(nbytes)
        export = memory.numpy()  # a new object each time; the storage made by frombuffer holds on to it
        weakref.finalize(export, self._free.append, memory).atexit = False
        return torch.frombuffer(export, dtype=dtype), bytes_of(memory)

    def _take(self, nbytes: int) -> Tensor:
        for _ in range(MOST_FREE):
            try:
                candidate = self._free.popleft()
            except IndexError:
                break
            if candidate.numel() == nbytes:
                return candidate
            self._free.append(candidate)
        return torch.empty(nbytes, dtype=torch.uint8)
