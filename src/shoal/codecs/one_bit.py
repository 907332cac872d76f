"""1-bit SGD: of each element its sign, of each column two values (Seide, Fu, Droppo, Li & Yu 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.blocks import check_block, count, from_rows, rows
from shoal.codecs.kernels import for_cpu, for_gpu
from shoal.codecs.packing import packed, unpacked, words
from shoal.codecs.wire import beside, seal, unseal
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
        parts = (torch.int32, words(n, 1)), (torch.float32, 2 * columns)
        gpu = for_gpu("one_bit", self.column, out) if beside(out, payload, *parts) else None
        if gpu is not None and gpu.decode(self.code, payload, self.column, out):
            return out  # else the lines below say what is wrong
        wrote, bodies = unseal(payload, self.code, n)
        if wrote != columns:
            raise WireError(f"a payload of {wrote} columns arrived where {columns} were expected")
        signs, values = expect(bodies, *parts)
        if (kernel := for_cpu("one_bit", self.column, out, values)) is not None:
            kernel.decode(signs.contiguous(), values, self.column, out)
            return out
        return read(signs, values, self.column, out)

    def _written(self, v: Tensor, rest: Tensor | None) -> Payload:
        n, columns, tensors = v.numel(), count(v.numel(), self.column), (v,) if rest is None else (v, rest)
        if (gpu := for_gpu("one_bit", self.column, *tensors)) is not None:
            payload: Payload = gpu.encode(self.code, v, rest, self.column)
            return payload
        if (kernel := for_cpu("one_bit", self.column, *tensors)) is not None:
            signs, values = torch.empty(words(n, 1), dtype=torch.int32), torch.empty(2 * columns)
            kernel.encode(v, rest, self.column, signs, values)
        else:
            u = v if rest is None else rest.add_(v)
            signs, values = written(u, self.column)
            if rest is not None:
                rest.sub_(read(signs, values, self.column, torch.empty_like(rest)))
        return seal(self.code, n, columns, signs, values)


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
