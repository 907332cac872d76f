"""TernGrad: of each element -1, 0 or 1 times a scale, drawn so that the mean is right (Wen et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs import draws, trits
from shoal.codecs.blocks import check_block, count
from shoal.codecs.kernels import for_cpu, for_gpu
from shoal.codecs.packing import words
from shoal.codecs.wire import beside, seal, unseal
from shoal.core.codec import Codec, Payload, State, expect, one_of_feedback
from shoal.core.errors import WireError

SMALLEST_CLIP = 1e-9  # scales that are much smaller still would have no reciprocal


@dataclass(frozen=True)
class Ternary(Codec):
    """Sends the scale of a block, its negative, or 0, at random, so that the mean is the element.

    Elements beyond `clip` standard deviations count as that; with 0, nothing is clipped. With feedback 1.5 is
    better than the paper's 2.5, with which what is left grows to fifteen times a gradient. A block is a run
    of `block` elements, so that layers far apart have scales of their own; multiples of 256 are fast. With
    `shared`, workers who average take the largest of their scales, and add up what travels on the way.
    """

    code: ClassVar[int] = 6

    clip: float | None = None  # None: 2.5, or with feedback 1.5
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
        """How many there are to the clip."""
        return (2.5 if self.feedback == "none" else 1.5) if self.clip is None else self.clip

    @property
    def merged(self) -> Codec:
        """An average that travels on has no feedback, unless that is double: it must be right by itself."""
        return replace(self, feedback="none") if self.feedback == "residual" else self

    @property
    def needs_all(self) -> bool:
        return self.shared

    def init(self, like: Tensor, seed: int = 0) -> State:
        return draws.start(seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return self._written(v, None, state)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        return self._written(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        n, blocks, block = out.numel(), count(out.numel(), self.block), self.block
        parts = (torch.int32, words(n, 2)), (torch.float32, blocks)
        gpu = for_gpu("ternary", block, out) if beside(out, payload, *parts) else None
        if gpu is not None and gpu.decode(self.code, payload, block, out):
            return out  # else the lines below say what is wrong
        wrote, bodies = unseal(payload, self.code, n)
        codes, scales = expect(bodies, *parts)
        codes, kernel = codes.contiguous(), for_cpu("ternary", block, out, scales)
        if wrote != blocks or (scales < 0).any():
            raise WireError("a payload of codec 'ternary' has a count or a scale that none has")
        if kernel is None:
            return trits.read(codes, scales, block, out)
        kernel.decode(codes, scales, block, out)
        return out

    def _written(self, v: Tensor, rest: Tensor | None, state: State) -> tuple[Payload, State]:
        n, blocks, block = v.numel(), count(v.numel(), self.block), self.block
        tensors = (v,) if rest is None else (v, rest)
        if (gpu := for_gpu("ternary", block, *tensors)) is not None:
            payload = gpu.encode(self.code, v, rest, self.deviations, block, draws.first(state))
            return payload, draws.after(state, block + blocks)
        if (kernel := for_cpu("ternary", block, *tensors)) is not None:
            codes, scales = torch.empty(words(n, 2), dtype=torch.int32), torch.empty(blocks)
            kernel.encode(v, rest, self.deviations, block, state, codes, scales)
        else:
            u = v if rest is None else rest.add_(v)
            scales = trits.scale(u, self.deviations, block)
            codes = trits.written(u, scales, block, *trits.noise(state, block, blocks, v.device))
            if rest is not None:
                rest.sub_(trits.read(codes, scales, block, torch.empty_like(rest)))
        return seal(self.code, n, blocks, codes, scales), draws.after(state, block + blocks)
