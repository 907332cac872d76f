"""1-bit SGD: the sign of each element, and two values a column (Seide, Fu, Droppo, Li & Yu 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.blocks import count, from_rows, rows
from shoal.codecs.packing import packed, unpacked, words
from shoal.codecs.wire import beside, seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_block, one_of_feedback
from shoal.kernels.dispatch import on_cpu, on_gpu


@dataclass(frozen=True)
class OneBit(Codec):
    """Sends the sign of each element, decoded as the mean of the elements of its column with that sign.

    A column is a run of `column` consecutive elements of the flat vector, as a row of a Linear's weight is in
    memory; multiples of 512 are fast. -0 counts as negative. Does not converge without error feedback.
    """

    code: ClassVar[int] = 5

    column: int = 512
    feedback: str = "double"

    def __post_init__(self) -> None:
        check_block("column", self.column)
        one_of_feedback(self.feedback)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._encoded(v, None), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._encoded(v, rest), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        n, columns = out.numel(), count(out.numel(), self.column)
        parts = (torch.int32, words(n, 1)), (torch.float32, 2 * columns)
        gpu = _gpu_kernel(self.column, out) if beside(out, payload, *parts) else None
        if gpu is not None and gpu.decode(self.code, payload, self.column, out):
            return out  # otherwise the checks below say what is wrong
        wrote, bodies = unseal(payload, self.code, n)
        if wrote != columns:
            raise WireError(f"a payload of {wrote} columns arrived where {columns} were expected")
        signs, values = expect(bodies, *parts)
        if (cpu := _cpu_kernel(self.column, out, values)) is not None:
            cpu.decode(signs.contiguous(), values, self.column, out)
            return out
        return read(signs, values, self.column, out)

    def _encoded(self, v: Tensor, rest: Tensor | None) -> Payload:
        n, columns, tensors = v.numel(), count(v.numel(), self.column), (v,) if rest is None else (v, rest)
        if (gpu := _gpu_kernel(self.column, *tensors)) is not None:
            payload: Payload = gpu.encode(self.code, v, rest, self.column)
            return payload
        if (cpu := _cpu_kernel(self.column, *tensors)) is not None:
            signs, values = torch.empty(words(n, 1), dtype=torch.int32), torch.empty(2 * columns)
            cpu.encode(v, rest, self.column, signs, values)
        else:
            u = v if rest is None else rest.add_(v)
            signs, values = written(u, self.column)
            if rest is not None:
                rest.sub_(read(signs, values, self.column, torch.empty_like(rest)))
        return seal(self.code, n, columns, signs, values)


def written(u: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """One bit an element, 1 unless it is negative; and of each column the means below and above 0."""
    grid = rows(u, column).double()
    below = grid.signbit()
    above = ~below.flatten()[: u.numel()]
    few, many = below.sum(1), rows(above, column).sum(1)
    low = grid.where(below, 0).sum(1) / few.clamp(min=1)
    high = grid.where(~below, 0).sum(1) / many.clamp(min=1)
    return packed(above, 1), torch.stack((low, high), 1).float().flatten()


def read(signs: Tensor, values: Tensor, column: int, out: Tensor) -> Tensor:
    """Decode into `out`."""
    above = rows(unpacked(signs, 1, out.numel()), column).bool()
    low, high = values.view(-1, 2, 1).unbind(1)
    return from_rows(high.where(above, low), out)


def _cpu_kernel(column: int, *tensors: Tensor) -> ModuleType | None:
    if not on_cpu(*tensors):
        return None
    from shoal.codecs.one_bit import cpu

    return cpu if cpu.able(column) else None


def _gpu_kernel(column: int, *tensors: Tensor) -> ModuleType | None:
    if not on_gpu(*tensors):
        return None
    from shoal.codecs.one_bit import gpu

    return gpu if gpu.able(column) else None
