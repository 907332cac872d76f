"""DeMo: decoupled momentum, of which only the fast components travel (Peng, Quesnelle & Kingma 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt

import torch
from torch import Tensor

from shoal.chunks.chunk_selection import ChunkMean, ChunkSelection
from shoal.core.codec import expect
from shoal.core.limits import at_least, between
from shoal.core.parameter_chunks import ParameterChunks, chunks_of
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy


@dataclass(frozen=True)
class DecoupledMomentum(Strategy):
    """Everyone has its own momentum; its largest frequencies travel at every step, and all step by sign."""

    sends = Sends.COMPRESSED
    ends_equal = True
    own_optimizer = True

    decay: float = 0.999  # beta: of the momentum
    kept: int = 32  # k: frequencies of each chunk that travel
    chunk: int = 64  # longest side of a chunk; a matrix has chunks of up to chunk x chunk elements
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, kept=self.kept, chunk=self.chunk)
        at_least(0, weight_decay=self.weight_decay)
        between(0, 1, decay=self.decay)

    @property
    def one_rate(self) -> bool:
        return True

    @property
    def mixes_steps(self) -> bool:
        return True  # its momentum and its steps have one learning rate

    async def worker(self, w: Node) -> None:
        wide = torch.promote_types(w.x.dtype, torch.float32)  # in half precision it would round back
        momentum = w.keep("momentum", torch.zeros_like(w.x, dtype=wide))  # M
        chunks = tuple(chunks_of(w.pieces, self.chunk))
        selection = ChunkSelection(chunks, tuple(min(self.kept, each.length) for each in chunks))
        waves = [(wave(each.height, momentum), wave(each.width, momentum)) for each in chunks]

        def accumulate(g: Tensor) -> None:
            if w.unmerged:  # else mixed precision overflowed here
                momentum.mul_(self.decay).add_(g, alpha=w.lr)

        async for _ in w.blocks(1, descend=accumulate):
            w.check_finite("the momentum", momentum)
            lr, parts = w.lr, self._encode(selection, waves, momentum) if w.unmerged else ()
            update = await w.gather(parts, partial(self._merge, selection, waves, momentum))
            if update.any():  # else mixed precision overflowed at every worker
                w.x.mul_(1 - lr * self.weight_decay).sub_(update.sign_(), alpha=lr)

    def _encode(
        self, selection: ChunkSelection, waves: Sequence[tuple[Tensor, Tensor]], momentum: Tensor
    ) -> tuple[Tensor, ...]:
        """The largest frequencies of the momentum, which are then taken from it."""
        spectra = [spectrum(each, pair, momentum) for each, pair in zip(selection.chunks, waves, strict=True)]
        places = selection.largest(spectra)
        values = [each.gather(1, place) for each, place in zip(spectra, places, strict=True)]
        for each, pair, found, place in zip(selection.chunks, waves, spectra, places, strict=True):
            put_spectrum(each, pair, found.scatter(1, place, 0.0), momentum)
        return selection.to_bytes(places), torch.cat([each.flatten() for each in values])

    def _merge(
        self,
        selection: ChunkSelection,
        waves: Sequence[tuple[Tensor, Tensor]],
        like: Tensor,
        given: Sequence[tuple[float, tuple[Tensor, ...]]],
    ) -> Tensor:
        """The mean of each frequency over the workers that sent it, as a vector."""
        mean, merged = ChunkMean(selection, like), torch.empty_like(like)
        for weight, parts in given:
            if parts:  # else that worker has no sample
                places, *rest = parts
                (values,) = expect(tuple(rest), (like.dtype, sum(selection.sizes)))
                mean.add(weight, selection.from_bytes(places), torch.split(values, selection.sizes))
        for each, pair, found in zip(selection.chunks, waves, mean.over_senders(), strict=True):
            put_spectrum(each, pair, found, merged)
        return merged


def wave(length: int, like: Tensor) -> Tensor:
    """The orthonormal cosine transform of so many elements, as a matrix with a row for each frequency."""
    place = torch.arange(length, dtype=torch.float64)
    frequency = place[:, None]
    rows = sqrt(2 / length) * torch.cos(pi * (2 * place + 1) * frequency / (2 * length))
    rows[0] /= sqrt(2)
    return rows.to(like)


def spectrum(chunks: ParameterChunks, waves: tuple[Tensor, Tensor], v: Tensor) -> Tensor:
    """The frequencies of each chunk of a parameter, one chunk in each row."""
    down, across = waves
    blocks = chunks.cut(v).view(-1, chunks.height, chunks.width)
    return (down @ blocks @ across.T).reshape(chunks.number, chunks.length)


def put_spectrum(chunks: ParameterChunks, waves: tuple[Tensor, Tensor], found: Tensor, out: Tensor) -> None:
    """Write the parameter with these frequencies into a vector: the inverse of `spectrum`."""
    down, across = waves
    blocks = found.view(-1, chunks.height, chunks.width)
    chunks.put((down.T @ blocks @ across).reshape(chunks.number, chunks.length), out)
