"""Brain floating point: two bytes an element, the range of single precision, about two decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.fp16 import LARGE
from shoal.codecs.kernels import on_cpu
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect


@dataclass(frozen=True)
class BF16(Codec):
    """Keeps the upper half of a float32, rounded to the nearest."""

    code: ClassVar[int] = 2

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if v.numel() >= LARGE and on_cpu(v):
            from shoal.codecs.kernels import halves

            short = halves.to_brain(v)
        else:
            short = v.bfloat16()
        return seal(self.code, v.numel(), v.numel(), short), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (short,) = expect(bodies, (torch.bfloat16, out.numel()))
        if out.numel() >= LARGE and on_cpu(out):
            from shoal.codecs.kernels import halves

            return halves.from_brain(short.contiguous(), out)
        return out.copy_(short)
