"""Brain floating point: two bytes an element, the range of single precision, about two decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.fp16 import LARGE
from shoal.codecs.kernels import on_cpu, on_gpu
from shoal.codecs.wire import beside, seal, unseal
from shoal.core.codec import Codec, Payload, State, expect


@dataclass(frozen=True)
class BF16(Codec):
    """Keeps the upper half of a float32, rounded to the nearest."""

    code: ClassVar[int] = 2

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_gpu(v):
            from shoal.codecs.kernels import halves_gpu

            return halves_gpu.encode(self.code, v, torch.bfloat16), state
        if v.numel() >= LARGE and on_cpu(v):
            from shoal.codecs.kernels import halves

            short = halves.to_brain(v)
        else:
            short = v.bfloat16()
        return seal(self.code, v.numel(), v.numel(), short), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        part = torch.bfloat16, out.numel()
        if on_gpu(out) and beside(out, payload, part):
            from shoal.codecs.kernels import halves_gpu

            if halves_gpu.decode(self.code, payload, out):
                return out  # else the lines below say what is wrong
        _, bodies = unseal(payload, self.code, out.numel())
        (short,) = expect(bodies, part)
        if out.numel() >= LARGE and on_cpu(out):
            from shoal.codecs.kernels import halves

            return halves.from_brain(short.contiguous(), out)
        return out.copy_(short)
