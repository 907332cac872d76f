"""Which kernel a vector goes to, and how the CPU kernels are compiled.

A codec's `cpu.py` holds Numba kernels and its `gpu.py` Triton kernels; so do files that end in `_cpu.py` and
`_gpu.py`. A kernel does in one pass over memory what PyTorch code does in several. The PyTorch code is the
reference that the tests compare with. It also runs where no kernel can: for a dtype other than float32, or
without Numba or Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

LOG = logging.getLogger("shoal")
F = TypeVar("F", bound=Callable[..., Any])
MANY = 1 << 16  # elements from which on a kernel outside a codec is worth the half second that Numba loads


def on_cpu(*tensors: Tensor) -> bool:
    """Whether a CPU kernel can take these tensors."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return fit and _has_numba()


def on_gpu(*tensors: Tensor) -> bool:
    """Whether a GPU kernel can take these tensors; it takes no empty ones."""
    fit = all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() and t.numel() for t in tensors)
    # a kernel starts on the current GPU, so the tensors must be in its memory
    return fit and all(t.device.index == torch.cuda.current_device() for t in tensors) and _has_triton()


def compiled(f: F) -> F:
    """Compile a CPU kernel with Numba, keep the machine code on disk, and release the GIL while it runs.

    Division by zero gives what it gives in NumPy: a check for zero inside a loop would prevent vectorisation.
    """
    from numba import njit  # here: without Numba, the codecs still import this module

    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(f))


@cache
def _has_numba() -> bool:
    if find_spec("numba") is not None:
        return True
    LOG.warning("codecs run several times faster with numba: pip install 'shoal[fast]'")
    return False


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
