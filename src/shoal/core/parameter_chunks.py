"""The parameters of a vector cut into equal chunks, so that the largest elements are found in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shoal.core.vector import Piece


@dataclass(frozen=True)
class ParameterChunks:
    """One parameter as blocks of `height` x `width`; a block's elements follow each other, row after row."""

    begin: int  # of the parameter in the vector
    rows: int
    columns: int
    height: int
    width: int

    @property
    def end(self) -> int:
        """Where the parameter ends."""
        return self.begin + self.rows * self.columns

    @property
    def length(self) -> int:
        """Elements of a chunk."""
        return self.height * self.width

    @property
    def number(self) -> int:
        """How many there are."""
        return self.rows * self.columns // self.length

    def cut(self, v: Tensor) -> Tensor:
        """The chunks of the parameter in this vector, one in each row."""
        grid = v[self.begin : self.end].view(
            self.rows // self.height, self.height, self.columns // self.width, self.width
        )
        return grid.transpose(1, 2).reshape(self.number, self.length)

    def positions(self, places: Tensor) -> Tensor:
        """Where in the vector these places are, of which each chunk has a row."""
        chunk, across = torch.arange(self.number, device=places.device)[:, None], self.columns // self.width
        row = chunk // across * self.height + places // self.width
        return self.begin + row * self.columns + chunk % across * self.width + places % self.width

    def put(self, chunks: Tensor, out: Tensor) -> None:
        """Write the chunks back into a vector: the inverse of `cut`."""
        across = self.columns // self.width
        grid = chunks.view(self.rows // self.height, across, self.height, self.width)
        out[self.begin : self.end] = grid.transpose(1, 2).reshape(-1)


def chunks_of(pieces: Iterable[Piece], side: int) -> list[ParameterChunks]:
    """Every parameter in chunks whose sides are the largest divisors of its own, up to `side`.

    A kernel counts as a matrix with a row for each of its outputs; part of a parameter, as a vector.
    """
    found = []
    for piece in pieces:
        is_matrix = piece.whole and len(piece.shape) > 1
        rows, columns = (piece.shape[0], prod(piece.shape[1:])) if is_matrix else (1, piece.size)
        found.append(ParameterChunks(piece.begin, rows, columns, divisor(rows, side), divisor(columns, side)))
    return found


def divisor(number: int, most: int) -> int:
    """The largest divisor of a number up to `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
