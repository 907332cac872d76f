"""QSGD's levels: norms in one pass over memory, rounding in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.blocks import count
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.kernels.blocks import measure
from shoal.codecs.kernels.compiler import compiled
from shoal.codecs.kernels.draws import draw
from shoal.core.codec import State

if TYPE_CHECKING:
    from shoal.codecs.qsgd import QSGD

PAGE = 4096  # elements that are rounded with the draws for them at hand; even


def encode(v: Tensor, codec: QSGD, state: State, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The numbers and norms of `v`; or of `v + rest`, leaving in `rest` what they lack."""
    u = v.detach() if rest is None else rest.add_(v)
    numbers, norms = torch.empty(v.numel(), dtype=torch.int16), torch.empty(count(v.numel(), codec.bucket))
    measure(u.numpy(), codec.bucket, codec.norm == "max", norms.numpy())
    begin = int(state[SEED]), int(state[COUNTER])
    _round(
        u.numpy(),
        norms.numpy(),
        codec.bucket,
        np.float32(codec.levels),
        *begin,
        rest is not None,
        numbers.numpy(),
    )
    return numbers, norms


def decode(numbers: Tensor, norms: Tensor, codec: QSGD, out: Tensor) -> Tensor:
    """Write what they stand for into `out`."""
    _decode(numbers.numpy(), norms.flatten().numpy(), codec.bucket, np.float32(codec.levels), out.numpy())
    return out


@compiled
def _round(
    v: Any, norms: Any, bucket: int, levels: Any, seed: int, counter: int, lacks: bool, numbers: Any
) -> None:
    draws = np.empty(PAGE, np.float32)
    begin = 0
    while begin < v.size:
        if begin % PAGE == 0:
            draw(seed, counter + begin // 2, draws[: v.size - begin])
        b = begin // bucket
        end = min((b + 1) * bucket, (begin // PAGE + 1) * PAGE, v.size)
        at = begin % PAGE
        part, number = v[begin:end], numbers[begin:end]
        if norms[b] > 0:
            _levels(part, norms[b], levels, draws[at : at + end - begin], number)
        else:
            number[:] = 0
        if lacks:
            for i in range(part.size):
                part[i] -= np.float32(number[i]) / levels * norms[b]
        begin = end


@compiled
def _levels(part: Any, norm: Any, levels: Any, draws: Any, numbers: Any) -> None:
    for i in range(part.size):
        share = np.float32(abs(part[i]) / norm * levels)
        below = np.int32(share)
        level = np.int32(below + (draws[i] < share - np.float32(below)))
        numbers[i] = np.int16(-level if part[i] < 0 else level)


@compiled
def _decode(numbers: Any, norms: Any, bucket: int, levels: Any, out: Any) -> None:
    for b in range(norms.size):
        part, number = out[b * bucket : (b + 1) * bucket], numbers[b * bucket : (b + 1) * bucket]
        for i in range(part.size):
            part[i] = np.float32(number[i]) / levels * norms[b]
