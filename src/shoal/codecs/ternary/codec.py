"""TernGrad: -1, 0 or 1 times a scale for each element, right in expectation (Wen et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.blocks import count
from shoal.codecs.packing import words
from shoal.codecs.ternary import trits
from shoal.codecs.ternary.shared_scale import average_trits
from shoal.codecs.wire import beside, seal, unseal
from shoal.core.averaging import Reductions
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_block, one_of_feedback
from shoal.kernels.dispatch import on_cpu, on_gpu

SMALLEST_CLIP = 1e-9  # of much smaller scales, the reciprocal would overflow


@dataclass(frozen=True)
class Ternary(Codec):
    """Sends the scale of a block, its negative, or 0, at random, so that the expectation is the element.

    Elements beyond `clip` standard deviations are clipped to it; 0 clips nothing. With error feedback, 1.5 is
    better than the paper's 2.5, which lets the residual grow to fifteen times a gradient. A block is a run of
    `block` elements, so that layers have scales of their own; multiples of 256 are fast. With `shared`,
    workers that average agree on the largest of their scales, and sum the trits in flight.
    """

    code: ClassVar[int] = 6

    clip: float | None = None  # None: 2.5, or 1.5 with error feedback
    feedback: str = "none"
    block: int = 2048
    shared: bool = False

    def __post_init__(self) -> None:
        if self.clip and not SMALLEST_CLIP <= self.clip < inf:
            raise ValueError(f"clip={self.clip} should be 0, which clips nothing, or a number such as 2.5")
        check_block("block", self.block)
        one_of_feedback(self.feedback)

    @property
    def deviations(self) -> float:
        """The clip in use, in standard deviations."""
        return (2.5 if self.feedback == "none" else 1.5) if self.clip is None else self.clip

    @property
    def in_flight(self) -> bool:
        return self.shared

    @property
    def needs_all(self) -> bool:
        return self.shared

    def init(self, like: Tensor, seed: int = 0) -> State:
        return draws.start(seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._encoded(v, None, state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._encoded(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        n, blocks, block = out.numel(), count(out.numel(), self.block), self.block
        parts = (torch.int32, words(n, 2)), (torch.float32, blocks)
        gpu = _gpu_kernel(block, out) if beside(out, payload, *parts) else None
        if gpu is not None and gpu.decode(self.code, payload, block, out):
            return out  # otherwise the checks below say what is wrong
        wrote, bodies = unseal(payload, self.code, n)
        codes, scales = expect(bodies, *parts)
        if wrote != blocks:
            raise WireError(f"a payload of {wrote} blocks arrived where {blocks} were expected")
        if (scales < 0).any():
            raise WireError("a payload of codec 'ternary' has a scale below 0")
        codes, cpu = codes.contiguous(), self.cpu_kernel(out, scales)
        if cpu is None:
            return trits.read(codes, scales, block, out)
        cpu.decode(codes, scales, block, out)
        return out

    async def average(self, v: Tensor, state: State, workers: Reductions) -> tuple[Tensor, State]:
        if not self.shared:
            return await super().average(v, state, workers)
        return await average_trits(self, v, state, workers)

    def stream_key(self, elements: int, part: str) -> str:
        return f"shared scale {elements} {part}"

    def cpu_kernel(self, *tensors: Tensor) -> ModuleType | None:
        """The CPU kernels, if they take these tensors and blocks of this length."""
        if not on_cpu(*tensors):
            return None
        from shoal.codecs.ternary import cpu

        return cpu if cpu.able(self.block) else None

    def _encoded(self, v: Tensor, rest: Tensor | None, state: State) -> tuple[Payload, State]:
        n, blocks, block = v.numel(), count(v.numel(), self.block), self.block
        tensors = (v,) if rest is None else (v, rest)
        if (gpu := _gpu_kernel(block, *tensors)) is not None:
            payload = gpu.encode(self.code, v, rest, self.deviations, block, draws.first(state))
            return payload, draws.after(state, block + blocks)
        if (cpu := self.cpu_kernel(*tensors)) is not None:
            codes, scales = torch.empty(words(n, 2), dtype=torch.int32), torch.empty(blocks)
            cpu.encode(v, rest, self.deviations, block, state, codes, scales)
        else:
            u = v if rest is None else rest.add_(v)
            scales = trits.scale(u, self.deviations, block)
            codes = trits.written(u, scales, block, *trits.noise(state, block, blocks, v.device))
            if rest is not None:
                rest.sub_(trits.read(codes, scales, block, torch.empty_like(rest)))
        return seal(self.code, n, blocks, codes, scales), draws.after(state, block + blocks)


def _gpu_kernel(block: int, *tensors: Tensor) -> ModuleType | None:
    if not on_gpu(*tensors):
        return None
    from shoal.codecs.ternary import gpu

    return gpu if gpu.able(block) else None
