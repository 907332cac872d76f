"""int8 on a CPU, in one pass: a block stays in cache from its first reading to the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.blocks_cpu import add_largest, largest
from shoal.kernels.dispatch import compiled

MOST = np.float32(127)
SHIFT = np.float32(1.5 * 2**23)  # added to a small number, it rounds it, and the lowest byte is the code


def encode(v: Tensor, block: int, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes and scales of `v`, or of `v + rest`; `rest` becomes the compression error."""
    codes = torch.empty(v.numel(), dtype=torch.int8)
    scales = torch.empty(count(v.numel(), block))
    if rest is None:
        _encode(v.detach().numpy(), block, codes.numpy(), scales.numpy())
    else:
        _encode_rest(v.detach().numpy(), rest.numpy(), block, codes.numpy(), scales.numpy())
    return codes, scales


def decode(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> bool:
    """Decode into `out`; return whether no code was -128."""
    return _decode(codes.contiguous().numpy(), scales.numpy(), block, out.numpy())


@compiled
def _encode(v: Any, block: int, codes: Any, scales: Any) -> None:
    for b in range(scales.size):
        part, code = v[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        top = largest(part)
        scales[b] = top / MOST
        if not top > 0:
            code[:] = 0
            continue
        steps = MOST / top
        for i in range(part.size):
            code[i] = np.int8(np.float32(part[i] * steps + SHIFT).view(np.int32))


@compiled
def _encode_rest(v: Any, rest: Any, block: int, codes: Any, scales: Any) -> None:
    for b in range(scales.size):
        part, code = rest[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        top = add_largest(v[b * block : (b + 1) * block], part)
        scale = top / MOST
        scales[b] = scale
        if not top > 0:
            code[:] = 0
            part -= scale * np.float32(0)  # NaN in the residual too, if the block is not finite
            continue
        steps = MOST / top
        for i in range(part.size):
            shifted = np.float32(part[i] * steps + SHIFT)
            code[i] = np.int8(np.float32(shifted).view(np.int32))
            part[i] -= (shifted - SHIFT) * scale


@compiled
def _decode(codes: Any, scales: Any, block: int, out: Any) -> bool:
    for b in range(scales.size):
        part, code, scale = out[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        lowest = np.int8(0)
        for i in range(part.size):
            lowest = min(lowest, code[i])
            part[i] = np.float32(code[i]) * scale
        if lowest < -MOST:
            return False
    return True
