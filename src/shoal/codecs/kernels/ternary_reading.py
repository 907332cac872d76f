"""Trits read back: in the upper two bits of a word, with zeros below, they are the floats 2, 0, -0 and -2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

GROUP, ROWS, LANES = 256, 16, 16
LAST, CODE = 30, np.int32(-(2**30))  # the upper two bits, and where they begin
HALF = np.float32(0.5)


def decode(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write what they stand for into `out`."""
    n, whole, blocks = out.numel(), out.numel() // block * block, out.numel() // block
    _decode(codes.numpy(), scales.numpy()[:blocks], block, out.numpy())
    if whole < n:
        last, more = torch.empty(block), pad(codes[whole // 16 :], (0, block // 16))
        _decode(more.numpy(), scales.numpy()[-1:], block, last.numpy())
        out[whole:] = last[: n - whole]


@compiled
def _decode(codes: Any, scales: Any, block: int, out: Any) -> None:
    code = lanes.splat_word(CODE)
    for b in range(scales.size):
        half = lanes.splat(scales[b] * HALF)
        for group in range(b * block, (b + 1) * block, GROUP):
            words = lanes.load_words(codes, group // LANES)
            for row in range(ROWS):  # upwards, or parts of a line of memory are read before they are written
                upper = lanes.up(words, lanes.splat_word(np.int32(LAST - 2 * row)))
                lanes.store(out, group + row * LANES, lanes.mul(lanes.floats(lanes.both(upper, code)), half))
