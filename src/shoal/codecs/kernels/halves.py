"""Two bytes an element, sixteen elements at a time: on ARM, torch takes one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels import pages
from shoal.codecs.kernels.choices import where_number
from shoal.codecs.kernels.compiler import compiled

LANES = 16
LARGEST = 65504.0
UPPER = np.uint32(16)
_HAS = get_host_cpu_features()


def able() -> bool:
    """Whether this processor has instructions for halves; else LLVM calls a function that is not there."""
    return bool(_HAS.get("neon") or _HAS.get("f16c"))


def to_half(v: Tensor) -> Tensor:
    """Rounded to half precision, what is out of range to the largest."""
    half = pages.empty(v.numel(), torch.float16)
    whole = v.numel() // LANES * LANES
    _to_half(v.detach().numpy(), whole, _words(half))
    half[whole:] = v[whole:].clamp(-LARGEST, LARGEST)
    return half


def from_half(half: Tensor, out: Tensor) -> Tensor:
    """Write these halves into `out`."""
    whole = out.numel() // LANES * LANES
    _from_half(_words(half), whole, out.numpy())
    out[whole:] = half[whole:]
    return out


def to_brain(v: Tensor) -> Tensor:
    """The upper halves of floats, rounded to the nearest, ties to even."""
    short = pages.empty(v.numel(), torch.bfloat16)
    whole = v.numel() // LANES * LANES
    _to_brain(v.detach().numpy(), whole, _words(short))
    short[whole:] = v[whole:]
    return short


def from_brain(short: Tensor, out: Tensor) -> Tensor:
    """Write what these are the upper halves of into `out`."""
    _from_brain(_words(short), out.numpy().view(np.uint32))
    return out


def _words(short: Tensor) -> Any:
    return short.view(torch.int16).numpy().view(np.uint16)  # numpy knows no brain floats


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
def _to_brain(v: Any, whole: int, out: Any) -> None:
    low, high = lanes.splat_word(np.int32(15)), lanes.splat_word(np.int32(31))
    half, nan = lanes.splat_word(np.int32(0x7FFF)), lanes.splat_word(np.int32(0x7FC00000))
    for i in range(0, whole, LANES):
        u = lanes.load(v, i)
        odd = lanes.down(lanes.up(lanes.bits(u), low), high)  # so that ties go to the even
        rounded = lanes.plus(lanes.plus(lanes.bits(u), odd), half)
        lanes.store_upper(out, i, where_number(u, rounded, nan))


@compiled
def _from_brain(short: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint32(short[i]) << UPPER
