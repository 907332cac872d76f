"""Four bits an element: a sign and three bits of exponent, and a scale a block (Douillard et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.blocks import count, from_rows, largest, rows
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_block, one_of_feedback
from shoal.kernels.dispatch import on_cpu

SIGN = 8
VALUES = (0.0, *(2.0**power for power in range(-6, 1)))  # of codes 0 to 7, in scales; cpu.py has them too
BORDERS = tuple((low + high) / 2 for low, high in pairwise(VALUES))


@dataclass(frozen=True)
class E3M0(Codec):
    """Rounds each element to the nearest of 0 and 1, 1/2, ... 1/64 of its block's largest magnitude.

    Halfway between two, it rounds up in magnitude. A block with an element that is not finite is decoded as
    NaN.
    """

    code: ClassVar[int] = 4

    block: int = 256  # elements that share a scale
    feedback: str = "none"

    def __post_init__(self) -> None:
        check_block("block", self.block, 2)
        one_of_feedback(self.feedback)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v):
            from shoal.codecs.e3m0 import cpu

            return self._sealed(v, *cpu.encode(v, self.block)), state
        blocks = rows(v, self.block)
        scales = largest(blocks)
        parts = blocks.abs() / scales[:, None]
        codes = torch.bucketize(parts, parts.new_tensor(BORDERS), right=True, out_int32=True)
        codes = codes.add_(blocks.signbit(), alpha=SIGN).where((scales > 0)[:, None], 0)
        two = codes.byte().flatten()[: v.numel() + v.numel() % 2].view(-1, 2)
        return self._sealed(v, two[:, 0] | two[:, 1] << 4, scales), state

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v, rest):
            from shoal.codecs.e3m0 import cpu

            return self._sealed(v, *cpu.encode(v, self.block, rest)), state
        return super().encode_rest(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        n, blocks = out.numel(), count(out.numel(), self.block)
        wrote, bodies = unseal(payload, self.code, n)
        if wrote != blocks:
            raise WireError(f"a payload of {wrote} blocks arrived where {blocks} were expected")
        pairs, scales = expect(bodies, (torch.uint8, count(n, 2)), (torch.float32, blocks))
        if (scales < 0).any() or (n % 2 and pairs[-1] >> 4):
            raise WireError("a payload of codec 'e3m0' has a scale below 0, or more codes than elements")
        if on_cpu(out, scales):
            from shoal.codecs.e3m0 import cpu

            return cpu.decode(pairs, scales, self.block, out)
        values = torch.tensor(VALUES, device=out.device)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).flatten().int()
        return from_rows(rows(torch.cat((values, -values))[codes], self.block) * scales[:, None], out)

    def _sealed(self, v: Tensor, pairs: Tensor, scales: Tensor) -> Payload:
        return seal(self.code, v.numel(), scales.numel(), pairs, scales)
