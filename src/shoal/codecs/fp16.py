"""Half precision: two bytes an element, about three decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class FP16(Codec):
    """Rounds to IEEE half precision; what is out of range travels as the largest half, not as infinity."""

    code: ClassVar[int] = 1

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        half = v.clamp(-LARGEST, LARGEST).half()
        return seal(self.code, v.numel(), v.numel(), half), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        _, bodies = unseal(payload, self.code, out.numel())
        (half,) = expect(bodies, (torch.float16, out.numel()))
        return out.copy_(half)
