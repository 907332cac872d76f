"""Random-k sparsification: a seed says which elements were sent (Stich, Cordonnier & Jaggi 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.draws import COUNTER, SEED
from shoal.codecs.sparse.codec import Sparsifier, two
from shoal.codecs.sparse.selection import how_many
from shoal.codecs.wire import seal, unseal
from shoal.core.codec import Payload, State, expect
from shoal.core.errors import WireError
from shoal.core.sparse_vectors import SparseVector
from shoal.kernels.dispatch import on_cpu


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Cuts the vector into even stretches, one for each element to send, and sends a random element of each.

    Without feedback each is multiplied by the length of its stretch, so the vector is right in expectation.
    If any element of the vector is not finite, the first value sent is NaN.
    """

    code: ClassVar[int] = 10

    def init(self, like: Tensor, seed: int = 0) -> State:
        return draws.start(seed)

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        count = how_many(self.density, v.numel())
        positions, stretches = drawn(state, count, v.numel(), v.device)
        scale = stretches.to(v.dtype) if self.feedback == "none" else 1
        payload = self._sealed(v, v.index_select(0, positions) * scale, state)
        return payload, draws.after(state, 2 * count)

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        count = how_many(self.density, v.numel())
        positions, _ = drawn(state, count, v.numel(), v.device)
        if on_cpu(v, rest):
            from shoal.codecs.sparse import cpu

            values = cpu.taken(rest, v, positions)
            payload = self._sealed_values(v, values, state)
        else:
            rest.add_(v)
            payload = self._sealed(rest, rest.index_select(0, positions), state)
            rest.index_fill_(0, positions, 0)
        return payload, draws.after(state, 2 * count)

    def bits(self, share: float, itemsize: int) -> float:
        return 8 * itemsize

    def read(self, payload: Payload, elements: int, dtype: torch.dtype) -> SparseVector:
        count, bodies = unseal(payload, self.code, elements)
        values, begin = two(bodies)
        if count > elements:
            raise WireError(f"{count} elements of a vector of {elements} arrived")
        expect(bodies, (dtype, count), (torch.int64, 2))
        state = {SEED: begin[0], COUNTER: begin[1]}
        positions, _ = drawn(state, count, elements, values.device)
        return SparseVector(elements, values.flatten(), positions)

    def _sealed(self, v: Tensor, values: Tensor, state: State) -> Payload:
        if not v.sum().isfinite() and not v.isfinite().all():  # the sum is faster, and mostly enough
            values[0] = torch.nan
        return self._sealed_values(v, values, state)

    def _sealed_values(self, v: Tensor, values: Tensor, state: State) -> Payload:
        begin = torch.stack([state[SEED], state[COUNTER]])
        return seal(self.code, v.numel(), values.numel(), values, begin)


def drawn(state: State, count: int, elements: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A position in each of `count` stretches, and the lengths of the stretches."""
    if device.type == "cpu" and on_cpu():
        from shoal.codecs.sparse import cpu

        return cpu.drawn(state, count, elements)
    length, longer = divmod(elements, count) if count else (0, 0)
    number = torch.arange(count, device=device)
    lengths = length + (number < longer).long()
    coarse, fine = draws.uniform(state, 2 * count, device).double().view(-1, 2).unbind(1)
    place = (coarse + fine * draws.STEP) * lengths  # 48 of 53 bits, so rounding never reaches the length
    return number * length + number.clamp(max=longer) + place.long(), lengths
