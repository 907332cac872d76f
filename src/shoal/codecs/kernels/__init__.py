"""Kernels: the same as a codec's own few lines of torch, in one pass over memory.

For each codec that has some: a file for the processor, compiled by numba, and one for GPUs, in Triton. What
they compute is what the lines of torch compute, which stay beside them as the reference; those are also what
runs where there is no kernel: for another dtype than float32, or without numba.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

LOG = logging.getLogger("shoal")


def on_cpu(*tensors: Tensor) -> bool:
    """Whether these can be given to a kernel for the processor."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return fit and _has_numba()


def on_gpu(*tensors: Tensor) -> bool:
    """Whether these can be given to a kernel for a GPU; they must not be empty."""
    fit = all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() and t.numel() for t in tensors)
    # kernels start on the current GPU, whose memory it must be
    return fit and all(t.device.index == torch.cuda.current_device() for t in tensors) and _has_triton()


def for_cpu(name: str, block: int, *tensors: Tensor) -> ModuleType | None:
    """The kernel of that name for the processor, if it can be given these and knows blocks so long."""
    return _able(name, block) if on_cpu(*tensors) else None


def for_gpu(name: str, block: int, *tensors: Tensor) -> ModuleType | None:
    """The same for a GPU."""
    return _able(f"{name}_gpu", block) if on_gpu(*tensors) else None


@cache
def _able(name: str, block: int) -> ModuleType | None:
    kernel = import_module(f"{__name__}.{name}")
    return kernel if kernel.able(block) else None


@cache
def _has_numba() -> bool:
    if find_spec("numba") is not None:
        return True
    LOG.warning("codecs run several times faster with numba: pip install 'shoal[fast]'")
    return False


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
