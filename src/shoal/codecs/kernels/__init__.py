"""Kernels: the same as a codec's own few lines of torch, in one pass over memory.

For each codec that has some: a file for the processor, compiled by numba, and one for GPUs, in Triton. What
they compute is what the lines of torch compute, which stay beside them as the reference; those are also what
runs where there is no kernel: for another dtype than float32, or without numba.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LOG = logging.getLogger("shoal")


def on_cpu(*tensors: Tensor) -> bool:
    """Whether these can be given to a kernel for the processor."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return fit and _has_numba()


def on_gpu(*tensors: Tensor) -> bool:
    """Whether these can be given to a kernel for a GPU."""
    fit = all(t.device.type == "cuda" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return fit and _has_triton()


@cache
def _has_numba() -> bool:
    if find_spec("numba") is not None:
        return True
    LOG.warning("codecs run several times faster with numba: pip install 'shoal[fast]'")
    return False


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
