"""Half precision: two bytes an element, about three decimal digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.codec import Codec, Payload, State, expect

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class FP16(Codec):
    """Rounds to IEEE half precision; what is out of range travels as the largest half, not as infinity."""

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return (v.clamp(-LARGEST, LARGEST).half(),), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        (half,) = expect(payload, (torch.float16, out.numel()))
        return out.copy_(half)
