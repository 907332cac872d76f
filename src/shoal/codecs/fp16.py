"""Half precision: two bytes an element, about three decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.kernels import on_cpu, on_gpu
from shoal.codecs.wire import beside, seal, unseal
from shoal.core.codec import Codec, Payload, State, expect

LARGEST = torch.finfo(torch.float16).max
LARGE = 2**16  # elements; with fewer, a kernel is not worth waiting for numba


@dataclass(frozen=True)
class FP16(Codec):
    """Rounds to IEEE half precision; what is out of range travels as the largest half, not as infinity."""

    code: ClassVar[int] = 1

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_gpu(v):
            from shoal.codecs.kernels import halves_gpu

            return halves_gpu.encode(self.code, v, torch.float16), state
        if v.numel() >= LARGE and on_cpu(v) and (kernel := _kernel()) is not None:
            half = kernel.to_half(v)
        else:
            half = v.clamp(-LARGEST, LARGEST).half()
        return seal(self.code, v.numel(), v.numel(), half), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        part = torch.float16, out.numel()
        if on_gpu(out) and beside(out, payload, part):
            from shoal.codecs.kernels import halves_gpu

            if halves_gpu.decode(self.code, payload, out):
                return out  # else the lines below say what is wrong
        _, bodies = unseal(payload, self.code, out.numel())
        (half,) = expect(bodies, part)
        if out.numel() >= LARGE and on_cpu(out) and (kernel := _kernel()) is not None:
            kernel.from_half(half.contiguous(), out)
        else:
            out.copy_(half)
        return out


def _kernel() -> ModuleType | None:
    from shoal.codecs.kernels import halves

    return halves if halves.able() else None
