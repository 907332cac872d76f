"""Trits read back: in the upper two bits of a word, with zeros below, they are the floats 2, 0, -0 and -2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.kernels import instructions as lanes
from shoal.codecs.kernels.compiler import compiled

GROUP, LANES = 256, 16
TWO, CODE = np.int32(2), np.int32(-(2**30))  # the last code of a word
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
    code, two = lanes.splat_word(CODE), lanes.splat_word(TWO)
    for b in range(scales.size):
        half = lanes.splat(scales[b] * HALF)
        for group in range(b * block, (b + 1) * block, GROUP):
            words = lanes.load_words(codes, group // LANES)
            for i in range(group + GROUP - LANES, group - LANES, -LANES):  # the last are in the upper bits
                lanes.store(out, i, lanes.mul(lanes.floats(lanes.both(words, code)), half))
                words = lanes.up(words, two)
