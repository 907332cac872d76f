"""Trits read back: in the upper two bits of a word, with zeros below, they are the floats 2, 0 and -2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

GROUP, LANES = 256, 16
ONE, TWO, NONE = np.int32(1), np.int32(2), np.int32(0)
CODE, UPPER = np.int32(-(2**30)), np.int32(-0x55555556)  # the last code of a word; the upper bits of all
HALF = np.float32(0.5)


def decode(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write what they stand for into `out`."""
    n, whole, blocks = out.numel(), out.numel() // block * block, out.numel() // block
    _decode(codes.numpy(), scales.numpy()[:blocks], block, out.numpy())
    if whole < n:
        last, more = torch.empty(block), pad(codes[whole // 16 :], (0, block // 16))
        _decode(more.numpy(), scales.numpy()[-1:], block, last.numpy())
        out[whole:] = last[: n - whole]


def strange(codes: Tensor) -> bool:
    """Whether a code is 2, which is never written."""
    return _strange(codes.numpy())


@compiled
def _decode(codes: Any, scales: Any, block: int, out: Any) -> None:
    code, two = lanes.splat_word(CODE), lanes.splat_word(TWO)
    for b in range(scales.size):
        half = lanes.splat(scales[b] * HALF)
        for group in range(b * block, (b + 1) * block, GROUP):
            words = lanes.load_words(codes, group // LANES)
            for i in range(group + GROUP - LANES, group - LANES, -LANES):  # the last are in the upper bits
                lanes.store(out, i, lanes.mul(lanes.floats(lanes.both(words, code)), half))
                words = lanes.up(words, two)


@compiled
def _strange(codes: Any) -> bool:
    found = NONE
    for i in range(codes.size):
        found |= codes[i] & ~np.int32(codes[i] << ONE)
    return bool((found & UPPER) != 0)
