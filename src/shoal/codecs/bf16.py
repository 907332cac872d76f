"""Brain floating point: two bytes an element, the range of single precision, about two decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect


@dataclass(frozen=True)
class BF16(Codec):
    """Keeps the upper half of a float32, rounded to the nearest."""

    code: ClassVar[int] = 2

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return seal(self.code, v.numel(), v.numel(), v.bfloat16()), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (short,) = expect(bodies, (torch.bfloat16, out.numel()))
        return out.copy_(short)
