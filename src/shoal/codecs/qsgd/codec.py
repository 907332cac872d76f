"""QSGD: a few levels a bucket, rounded at random, right in expectation (Alistarh et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.blocks import count, euclidean, from_rows, largest, rows
from shoal.codecs.qsgd import elias
from shoal.codecs.qsgd.elias import CHAPTER
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Codec, Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.limits import check_block, one_of_feedback
from shoal.kernels.dispatch import on_cpu

NORMS = ("l2", "max")


@dataclass(frozen=True)
class QSGD(Codec):
    """Rounds each element, as a share of its bucket's norm, to one of a few levels, up or down at random.

    The result is right in expectation, so it needs no error feedback. With feedback, take more levels than
    the root of the bucket, or the residual may grow. Levels are sent in Elias code, or in a fixed number of
    bits if that is shorter. A bucket with an element that is not finite is decoded as NaN.
    """

    code: ClassVar[int] = 7

    levels: int = 15  # s, besides zero: 5 bits with the sign, before they are packed
    bucket: int = 512  # d: elements that share a norm
    norm: str = "l2"  # or max: fewer zeros, less variance, more bits
    feedback: str = "none"

    def __post_init__(self) -> None:
        check_block("bucket", self.bucket)
        one_of_feedback(self.feedback)
        if not 1 <= self.levels <= elias.LARGEST:
            raise ValueError(f"levels={self.levels} should be from 1 to {elias.LARGEST}")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} should be one of {', '.join(NORMS)}")

    def init(self, like: Tensor, seed: int = 0) -> State:
        return draws.start(seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v):
            return self._by_kernel(v, None, state)
        numbers, norms = self._quantised(v, state)
        return self._sealed(v, *elias.pack(numbers, self.levels), norms), draws.after(state, v.numel())

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        if on_cpu(v, rest):
            return self._by_kernel(v, rest, state)
        return super().encode_rest(v, rest, state)

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        size, bodies = unseal(payload, self.code, out.numel())
        n = out.numel()
        parts = (torch.float32, count(n, self.bucket)), (torch.int32, count(n, CHAPTER)), (torch.uint8, size)
        norms, lengths, stream = expect(bodies, *parts)
        if (norms < 0).any():
            raise WireError("a payload of codec 'qsgd' has a norm below 0")
        if on_cpu(out, norms):
            from shoal.codecs.qsgd import cpu

            stream, lengths = elias.as_long_as_its_chapters(stream, lengths, n, self.levels)
            if not cpu.decode(stream, lengths, norms, self.levels, self.bucket, CHAPTER, out):
                raise elias.invalid(self.levels)
            return out
        numbers = elias.unpack(stream, lengths, n, self.levels)
        shares = rows(numbers.to(out.device), self.bucket)
        shares /= shares.new_tensor(self.levels)  # a tensor: torch rounds a division by a number differently
        return from_rows(shares * norms[:, None], out)

    def _quantised(self, v: Tensor, state: State) -> tuple[Tensor, Tensor]:
        blocks = rows(v, self.bucket)
        norms = largest(blocks) if self.norm == "max" else euclidean(blocks)
        shares = (blocks.abs() / norms[:, None] * self.levels).where((norms > 0)[:, None], 0)
        shares = shares.flatten()[: v.numel()]
        below = shares.floor()
        numbers = below + (draws.uniform(state, v.numel(), v.device) < shares - below)
        return numbers.copysign(v).short(), norms

    def _by_kernel(self, v: Tensor, rest: Tensor | None, state: State) -> tuple[Payload, State]:
        from shoal.codecs.qsgd import cpu

        parts = cpu.encode(v, self.levels, self.bucket, self.norm, state, CHAPTER, rest)
        return self._sealed(v, *parts), draws.after(state, v.numel())

    def _sealed(self, v: Tensor, stream: Tensor, lengths: Tensor, norms: Tensor) -> Payload:
        return seal(self.code, v.numel(), stream.numel(), norms, lengths, stream)
