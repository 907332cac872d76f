"""New memory for what is encoded, in large pages: to map many small ones takes longer than to encode."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 2**25  # bytes; glibc takes less from memory that was in use before


def empty(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor whose contents are still to be written. It keeps its length."""
    nbytes = elements * dtype.itemsize
    if nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages, or short of memory
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(elements, dtype=dtype)
