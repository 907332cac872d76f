"""Two bytes an element: IEEE half precision (fp16) and brain floating point (bf16)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.wire import beside, seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.kernels.dispatch import on_cpu, on_gpu

LARGEST = torch.finfo(torch.float16).max
LARGE = 2**16  # elements; for fewer, importing Numba takes longer than its kernel saves


@dataclass(frozen=True)
class Half(Codec):
    """Rounds each element to a float of two bytes."""

    dtype: ClassVar[torch.dtype]

    @property
    def cast(self) -> torch.dtype:
        return self.dtype

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_gpu(v):
            from shoal.codecs.halves import gpu

            return gpu.encode(self.code, v, self.dtype), state
        kernel = _cpu_kernel(self.dtype, v)
        short = _rounded(v, self.dtype) if kernel is None else kernel.encode(v, self.dtype)
        return seal(self.code, v.numel(), v.numel(), short), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        part = self.dtype, out.numel()
        if on_gpu(out) and beside(out, payload, part):
            from shoal.codecs.halves import gpu

            if gpu.decode(self.code, payload, out):
                return out  # otherwise the checks below say what is wrong
        _, bodies = unseal(payload, self.code, out.numel())
        (short,) = expect(bodies, part)
        kernel = _cpu_kernel(self.dtype, out)
        if kernel is None:
            out.copy_(short)
        else:
            kernel.decode(short.contiguous(), out)
        return out


@dataclass(frozen=True)
class FP16(Half):
    """Rounds to half precision, about three decimal digits; out of range becomes the largest half."""

    code: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class BF16(Half):
    """Keeps the upper half of a float32, rounded to nearest: its full range, about two decimal digits."""

    code: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def _rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float16:
        return v.to(dtype)
    wide = torch.promote_types(v.dtype, torch.float16)  # bfloat16 itself would round the limit up to 2**16
    return v.to(wide).clamp(-LARGEST, LARGEST).half()


def _cpu_kernel(dtype: torch.dtype, v: Tensor) -> ModuleType | None:
    if v.numel() < LARGE or not on_cpu(v):
        return None
    from shoal.codecs.halves import cpu

    return cpu if cpu.able(dtype) else None
