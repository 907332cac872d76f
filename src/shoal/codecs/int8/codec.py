"""One byte an element, and a scale for each block (Dettmers et al. 2022, with even steps)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.blocks import count, from_rows, largest, rows
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_block, one_of_feedback
from shoal.kernels.dispatch import on_cpu

MOST = 127  # the code of the largest magnitude in a block; -128 is never written


@dataclass(frozen=True)
class Int8(Codec):
    """Rounds each element to one of 255 even steps up to the largest magnitude of its block, ties to even.

    A block with an element that is not finite is decoded as NaN.
    """

    code: ClassVar[int] = 3

    block: int = 2048  # elements that share a scale
    feedback: str = "none"

    def __post_init__(self) -> None:
        check_block("block", self.block)
        one_of_feedback(self.feedback)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v):
            from shoal.codecs.int8 import cpu

            return self._sealed(*cpu.encode(v, self.block)), state
        blocks = rows(v, self.block)
        top = largest(blocks)
        most = top.new_tensor(MOST)  # a tensor: torch rounds a division by a number differently
        steps = (blocks * (most / top)[:, None]).round().where((top > 0)[:, None], 0)
        codes = steps.to(torch.int8).flatten()[: v.numel()]
        return self._sealed(codes, top / most), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v, rest):
            from shoal.codecs.int8 import cpu

            return self._sealed(*cpu.encode(v, self.block, rest)), state
        return super().encode_rest(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        wrote, bodies = unseal(payload, self.code, out.numel())
        blocks = count(out.numel(), self.block)
        if wrote != blocks:
            raise WireError(f"a payload of {wrote} blocks arrived where {blocks} were expected")
        codes, scales = expect(bodies, (torch.int8, out.numel()), (torch.float32, blocks))
        if on_cpu(out, scales):
            from shoal.codecs.int8 import cpu

            known = cpu.decode(codes, scales, self.block, out)
        else:
            known = not bool((codes < -MOST).any())
            from_rows(rows(codes, self.block) * scales[:, None], out)
        if not known or (scales < 0).any():
            raise WireError("a payload of codec 'int8' has a scale below 0, or the code -128")
        return out

    def _sealed(self, codes: Tensor, scales: Tensor) -> Payload:
        return seal(self.code, codes.numel(), scales.numel(), codes, scales)
