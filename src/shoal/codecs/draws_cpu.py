"""The draws of `draws.py`, for CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.codecs.draws import FIRST as _FIRST
from shoal.codecs.draws import GAMMA as _GAMMA
from shoal.codecs.draws import SECOND as _SECOND
from shoal.kernels.dispatch import compiled

GAMMA, FIRST, SECOND = np.uint64(_GAMMA), np.uint64(_FIRST), np.uint64(_SECOND)
STEP = np.float32(2.0**-24)


@compiled
def draw(seed: int, counter: int, out: Any) -> None:
    """Fill `out` with the draws that follow the first `counter` words of this seed."""
    before = np.uint64(seed) + np.uint64(counter + 1) * GAMMA
    for pair in range(out.size // 2):
        word = _mixed(before + np.uint64(pair) * GAMMA)
        out[2 * pair] = np.float32(np.int32((word >> np.uint64(8)) & np.uint64(0xFFFFFF))) * STEP
        out[2 * pair + 1] = np.float32(np.int32(word >> np.uint64(40))) * STEP
    if out.size % 2:
        word = _mixed(before + np.uint64(out.size // 2) * GAMMA)
        out[out.size - 1] = np.float32(np.int32((word >> np.uint64(8)) & np.uint64(0xFFFFFF))) * STEP


@compiled
def _mixed(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> np.uint64(30))) * FIRST
    word = (word ^ (word >> np.uint64(27))) * SECOND
    return word ^ (word >> np.uint64(31))
