"""Trits on a shared scale: sums of them in fields of a few bits, which never overflow (Wen et al. 2017).

First the workers agree on a scale, the largest that any of them needs; the paper calls that scaler sharing.
Then their trits are summed, which is exact: nothing is compressed anew on the way back.

Worker k has u_k, with weight w_k, and would scale a block by s_k. All workers take S, the largest w_k s_k,
and draw the trits t_k of w_k u_k on that scale. The average is S (t_1 + ... + t_N) / W, where W is the sum of
the weights. A field holds the sum of t_k + 1, from 0 to 2 N, so packed words are added as integers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs import draws
from shoal.codecs.blocks import count
from shoal.codecs.packing import numbers, widened, words
from shoal.codecs.ternary import trits
from shoal.core.averaging import Reductions
from shoal.core.codec import REST, State

LEAST = 2.0**-126  # the smallest scale whose reciprocal is a float32
FIELDS = (2, 4, 8, 16)  # bits
ONES = 0x55555555  # 1 in every field of two bits


class TritOptions(Protocol):
    """What of a ternary codec matters here."""

    @property
    def block(self) -> int:
        """Elements with one scale."""
        ...

    @property
    def deviations(self) -> float:
        """Where elements are clipped, in standard deviations; 0 clips nothing."""
        ...

    @property
    def feedback(self) -> str:
        """What becomes of the compression error."""
        ...

    def cpu_kernel(self, *tensors: Tensor) -> ModuleType | None:
        """The CPU kernels, if they take these tensors."""
        ...


async def average_trits(
    codec: TritOptions, v: Tensor, state: State, workers: Reductions
) -> tuple[Tensor, State]:
    """The average of `v`, and the state for the next vector."""
    brings = state if workers.gives else {name: kept for name, kept in state.items() if name != REST}
    brought = SharedTrits(codec, v, workers.weight, workers.size, brings)
    shared = await workers.largest(brought.scales())
    summed = await workers.sum(brought.words(shared))
    average, after = brought.finish(summed, workers.total)
    return average, after if workers.gives else state  # who gave nothing lacks what it lacked


def field(workers: int) -> int:
    """How many bits the sum of so many workers' trits takes."""
    for bits in FIELDS:
        if 2 * workers < 1 << bits:
            return bits
    raise ValueError(f"{workers} workers are too many for trits on a shared scale; take 'ternary' without it")


class SharedTrits:
    """One worker's part in an average: its scales, its trits, and the result."""

    def __init__(self, codec: TritOptions, v: Tensor, weight: float, workers: int, state: State) -> None:
        self._codec, self._weight, self._workers, self._state = codec, weight, workers, state
        self._bits = field(workers)
        self._like, self._blocks = v, count(v.numel(), codec.block)
        given = v.detach().float() + state[REST] if REST in state else v.detach().float()
        self._u = pad(given, (0, self._blocks * codec.block - v.numel()))
        self._own = self._shared = self._codes = v.new_empty(0)

    def scales(self) -> Tensor:
        """The scale of each block, times the weight."""
        codec, n = self._codec, self._like.numel()
        kernel = codec.cpu_kernel(self._u)
        if kernel is not None:
            self._own = kernel.scales(self._u, codec.deviations, codec.block, n)
        else:
            self._own = trits.scale(self._u[:n], codec.deviations, codec.block)
        scaled = self._own * self._weight
        return scaled.where(~(scaled < LEAST), 0)

    def words(self, shared: Tensor) -> Tensor:
        """The trits on that scale, as fields that can be added."""
        block, limit = self._codec.block, self._own[:, None]
        drawn = self._u.view(self._blocks, block).clamp(-limit, limit).mul_(self._weight).flatten()
        kernel = self._codec.cpu_kernel(drawn, shared)
        if kernel is not None:
            codes = kernel.codes(drawn, shared, block, self._state)
        else:
            codes = trits.written(
                drawn, shared, block, *trits.noise(self._state, block, self._blocks, drawn.device)
            )
        self._shared, self._codes = shared, codes
        some = codes & ONES
        fields: Tensor = some + ONES - ((some & (codes >> 1)) << 1)
        bits = FIELDS[0]
        while bits < self._bits:
            fields, bits = widened(fields, bits), 2 * bits
        return fields[: words(self._like.numel(), bits)]

    def finish(self, summed: Tensor, total: float) -> tuple[Tensor, State]:
        """The average, and the state for the next vector; unchanged if the average is not finite."""
        n, block = self._like.numel(), self._codec.block
        counts = pad(numbers(summed, self._bits, n).float(), (0, len(self._u) - n))
        counts.sub_(self._workers).view(self._blocks, block).mul_((self._shared / total)[:, None])
        average = counts[:n].to(self._like.dtype)
        if not self._shared.isfinite().all():
            return average, self._state
        state = draws.after(self._state, block + self._blocks)
        if self._codec.feedback != "none" and self._weight:
            sent, kernel = torch.empty_like(self._u), self._codec.cpu_kernel(self._u, self._shared)
            read = trits.read if kernel is None else kernel.decode
            read(self._codes, self._shared, block, sent)
            state[REST] = self._u.sub_(sent, alpha=1 / self._weight)[:n]
        return average, state
