"""Two-byte floats on a CPU, many elements at a time: on ARM, torch converts one after the other."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from shoal.codecs import lanes
from shoal.kernels.dispatch import compiled

LANES = 16
LARGEST = 65504.0
UPPER, ONE, BELOW_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
NAN = np.uint16(0x7FC0)
LARGE_PAGES = 2**25  # bytes; glibc serves smaller requests from memory that is already mapped
_HAS = get_host_cpu_features()


def able(dtype: torch.dtype) -> bool:
    """Whether this CPU converts to `dtype` itself; without the instruction, LLVM calls a missing function."""
    return dtype != torch.float16 or bool(_HAS.get("neon") or _HAS.get("f16c"))


def encode(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`, ties to even; out of range becomes the largest half."""
    short = empty(v.numel(), dtype)
    if dtype == torch.float16:
        whole = v.numel() // LANES * LANES
        _to_half(v.detach().numpy(), whole, _words(short))
        short[whole:] = v[whole:].clamp(-LARGEST, LARGEST)
    else:
        _to_brain(v.detach().numpy(), _words(short))
    return short


def decode(short: Tensor, out: Tensor) -> None:
    """Write these two-byte floats into `out`."""
    if short.dtype == torch.float16:
        whole = out.numel() // LANES * LANES
        _from_half(_words(short), whole, out.numpy())
        out[whole:] = short[whole:]
    else:
        _from_brain(_words(short), out.numpy().view(np.uint32))


def empty(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat, uninitialised tensor; a large one in huge pages, since mapping small pages outlasts encoding.

    Its storage cannot be resized.
    """
    nbytes = elements * dtype.itemsize
    if nbytes >= LARGE_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages, or short of memory
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(elements, dtype=dtype)


def _words(short: Tensor) -> Any:
    return short.view(torch.int16).numpy().view(np.uint16)  # NumPy has no bfloat16


@compiled
def _to_half(v: Any, whole: int, out: Any) -> None:
    least, most = lanes.splat(np.float32(-LARGEST)), lanes.splat(np.float32(LARGEST))
    for i in range(0, whole, LANES):
        lanes.store_halves(out, i, lanes.lesser(lanes.greater(lanes.load(v, i), least), most))


@compiled
def _from_half(half: Any, whole: int, out: Any) -> None:
    for i in range(0, whole, LANES):
        lanes.store(out, i, lanes.load_halves(half, i))


@compiled
def _to_brain(v: Any, out: Any) -> None:
    for i in range(v.size):
        bits = np.float32(v[i]).view(np.uint32)
        odd = (bits >> UPPER) & ONE  # rounds ties to even
        out[i] = np.uint16((bits + odd + BELOW_HALF) >> UPPER) if v[i] == v[i] else NAN


@compiled
def _from_brain(short: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint32(short[i]) << UPPER
