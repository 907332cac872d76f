"""1-bit SGD: of each element its sign, of each column two values (Seide, Fu, Droppo, Li & Yu 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.blocks import check_block, count, from_rows, rows
from shoal.codecs.kernels import on_cpu, on_gpu
from shoal.codecs.packing import packed, unpacked, words
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect, one_of_feedback
from shoal.core.errors import WireError


@dataclass(frozen=True)
class OneBit(Codec):
    """Sends the sign of each element; it arrives as the mean of those elements of its column that share it.

    A column is a run of `column` consecutive elements of the flat vector, as a row of a Linear's weight is in
    memory; multiples of 512 are fast. -0 counts as below 0. Does not converge without feedback.
    """

    code: ClassVar[int] = 5

    column: int = 512
    feedback: str = "double"

    def __post_init__(self) -> None:
        check_block("column", self.column)
        one_of_feedback(self.feedback)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._written(v, None), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._written(v, rest), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        n, columns = out.numel(), count(out.numel(), self.column)
        wrote, bodies = unseal(payload, self.code, n)
        if wrote != columns:
            raise WireError(f"a payload of {wrote} columns arrived where {columns} were expected")
        signs, values = expect(bodies, (torch.int32, words(n, 1)), (torch.float32, 2 * columns))
        if (kernel := self._kernel(out, values)) is not None:
            kernel.decode(signs.contiguous(), values, self.column, out)
            return out
        return read(signs, values, self.column, out)

    def _written(self, v: Tensor, rest: Tensor | None) -> Payload:
        n, columns = v.numel(), count(v.numel(), self.column)
        if (kernel := self._kernel(v) if rest is None else self._kernel(v, rest)) is not None:
            signs = torch.empty(words(n, 1), dtype=torch.int32, device=v.device)
            values = torch.empty(2 * columns, device=v.device)
            kernel.encode(v, rest, self.column, signs, values)
        else:
            u = v if rest is None else rest.add_(v)
            signs, values = written(u, self.column)
            if rest is not None:
                rest.sub_(read(signs, values, self.column, torch.empty_like(rest)))
        return seal(self.code, n, columns, signs, values)

    def _kernel(self, *tensors: Tensor) -> ModuleType | None:
        if on_cpu(*tensors):
            from shoal.codecs.kernels import one_bit

            return one_bit if one_bit.able(self.column) else None
        if on_gpu(*tensors):
            from shoal.codecs.kernels import one_bit_gpu

            return one_bit_gpu if one_bit_gpu.able(self.column) else None
        return None


def written(u: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """The bits, set where an element is not below 0, and of each column the means below 0 and above."""
    grid = rows(u, column).double()
    below = grid.signbit()
    above = ~below.flatten()[: u.numel()]
    few, many = below.sum(1), rows(above, column).sum(1)
    low = grid.where(below, 0).sum(1) / few.clamp(min=1)
    high = grid.where(~below, 0).sum(1) / many.clamp(min=1)
    return packed(above, 1), torch.stack((low, high), 1).float().flatten()


def read(signs: Tensor, values: Tensor, column: int, out: Tensor) -> Tensor:
    """Write what they stand for into `out`."""
    above = rows(unpacked(signs, 1, out.numel()), column).bool()
    low, high = values.view(-1, 2, 1).unbind(1)
    return from_rows(high.where(above, low), out)
