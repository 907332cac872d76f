"""SparseLoCo: local steps, then a few large elements of every chunk, in two bits each (Sarfi et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.chunks.bits import bytes_of, from_bytes, to_bytes
from shoal.chunks.chunk_selection import ChunkMean, ChunkSelection
from shoal.core.codec import expect
from shoal.core.limits import above, at_least, check_density, one_of
from shoal.core.parameter_chunks import chunks_of
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

LEVELS = {"2bit": 4, "signmag": 4, "8bit": 256, "exact": 0}
MERGES = ("touched", "all")
SPREAD = 6.0  # standard deviations that the bins cover


@dataclass(frozen=True)
class SparseLoCo(Strategy):
    """Error feedback instead of outer momentum: what did not travel fades, and comes with a later round."""

    sends = Sends.COMPRESSED
    ends_equal = True
    keeps_changes = False  # only some elements of a change travel

    period: int = 15  # H: inner steps in a round
    density: float = 0.03125  # share of each chunk's elements that travel
    chunk: int = 64  # longest side of a chunk; a matrix has chunks of up to chunk x chunk elements
    values: str = "2bit"  # how they travel; "8bit", "signmag": a sign and one of two sizes; "exact"
    decay: float = 0.95  # beta: what is left, in the next round, of what did not travel
    rate: float = 1.0  # alpha: outer learning rate
    merge: str = "touched"  # an element's mean over the workers that sent it; "all": over all workers

    def __post_init__(self) -> None:
        at_least(1, period=self.period, chunk=self.chunk)
        check_density(self.density)
        one_of(tuple(LEVELS), values=self.values)
        one_of(MERGES, merge=self.merge)
        at_least(0, decay=self.decay)
        above(0, rate=self.rate)
        if self.decay > 1:
            raise ValueError(f"decay={self.decay} must be at most 1")

    def steps_per_update(self, workers: int) -> float:
        return workers / self.rate

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # theta: where every round begins
        error = w.keep("error", torch.zeros_like(w.x))  # e
        selection = self._selection(w)
        async for _ in w.blocks(self.period):
            places = selection.update(error, self.decay, start, w.x)
            w.check_finite("the displacement", error)
            parts = self._encode(selection, error, places)
            start.sub_(await w.gather(parts, partial(self._merge, selection, w.x)), alpha=self.rate)
            w.x.copy_(start)

    def solution(self, node: Node) -> Tensor:
        return node.keep("start", node.x)

    def _selection(self, w: Node) -> ChunkSelection:
        chunks = tuple(chunks_of(w.pieces, self.chunk))
        return ChunkSelection(chunks, tuple(max(1, round(each.length * self.density)) for each in chunks))

    def _encode(self, selection: ChunkSelection, error: Tensor, places: list[Tensor]) -> tuple[Tensor, ...]:
        """What travels of the error, its elements at these places, which is then taken from it."""
        positions = [each.positions(p).flatten() for each, p in zip(selection.chunks, places, strict=True)]
        parts = self._to_parts([error[p] for p in positions])
        for p, value in zip(positions, self._from_parts(parts, selection.sizes, error), strict=True):
            error.index_add_(0, p, -value)
        return (selection.to_bytes(places), *parts)

    def _merge(
        self, selection: ChunkSelection, like: Tensor, given: Sequence[tuple[float, tuple[Tensor, ...]]]
    ) -> Tensor:
        """The mean of what all workers sent, as a vector."""
        mean, merged = ChunkMean(selection, like), torch.empty_like(like)
        for weight, (places, *parts) in given:
            if weight:
                values = self._from_parts(parts, selection.sizes, like)
                mean.add(weight, selection.from_bytes(places), values)
        means = mean.over_senders() if self.merge == "touched" else mean.over_all()
        for each, chunk in zip(selection.chunks, means, strict=True):
            each.put(chunk, merged)
        return merged

    def _to_parts(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values of each parameter: themselves, or their codes and a table of the codes' values."""
        levels = LEVELS[self.values]
        if not levels:
            return (torch.cat([each.flatten() for each in values]),)
        quantize = by_sign_and_size if self.values == "signmag" else partial(by_deviation, levels=levels)
        codes, tables = zip(*(quantize(each.flatten()) for each in values), strict=True)
        bits = (levels - 1).bit_length()
        return torch.cat([to_bytes(each, bits) for each in codes]), torch.cat(tables)

    def _from_parts(self, parts: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """The values that `_to_parts` wrote. Raises WireError for parts that are none."""
        levels = LEVELS[self.values]
        if not levels:
            return list(torch.split(expect(tuple(parts), (like.dtype, sum(sizes)))[0], list(sizes)))
        bits = (levels - 1).bit_length()
        lengths = [bytes_of(size, bits) for size in sizes]
        packed, tables = expect(tuple(parts), (torch.uint8, sum(lengths)), (like.dtype, levels * len(sizes)))
        pairs = zip(torch.split(packed, lengths), torch.split(tables, levels), sizes, strict=True)
        return [table[from_bytes(part, bits, size)] for part, table, size in pairs]


def by_deviation(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Each value's code, its bin among bins of equal width about the mean; and the mean value of each bin."""
    mean = values.mean()
    away = values - mean
    width = SPREAD / levels * (away.norm() / max(1, values.numel() - 1) ** 0.5)
    codes = (away / torch.where(width > 0, width, 1.0) + levels / 2).round().clamp(0, levels - 1).long()
    return codes, mean + means_of(away, codes, levels)


def by_sign_and_size(values: Tensor) -> tuple[Tensor, Tensor]:
    """A code for each value: its sign, and whether it is larger than most; and the value of each code."""
    sizes = values.abs()
    is_large = (sizes > sizes.mean()).long()
    table = means_of(sizes, is_large, 2)
    return is_large + 2 * (values < 0), torch.cat((table, -table))


def means_of(values: Tensor, codes: Tensor, levels: int) -> Tensor:
    """The mean of the values that have each code; 0 where none has."""
    sums = values.new_zeros(levels).index_add_(0, codes, values)
    return sums / torch.bincount(codes, minlength=levels).clamp(min=1)
