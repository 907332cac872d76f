"""Matrices: the layers of a vector that are written as a product of two thin matrices, P Q'.

M is n x q, P is n x rank, Q is q x rank. One step of the power method finds them: P = M Q with its columns
made orthonormal, then Q = M' P. It begins with the Q of the step before, so that many steps come near the
best there is. That Q is made orthonormal first: P Q' does not change by it, and all numbers keep the size of
the gradient's, where otherwise they would have that of its square, which half precision does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shoal.core.seeds import stream
from shoal.core.vector import Piece


@dataclass(frozen=True)
class Matrix:
    """Where a matrix lies in a vector, row after row; a kernel has a row for each of its outputs."""

    begin: int
    rows: int  # n
    columns: int  # q

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.begin + self.rows * self.columns

    def of(self, v: Tensor) -> Tensor:
        """The matrix in this vector, as a view."""
        return v[self.begin : self.end].view(self.rows, self.columns)


@dataclass(frozen=True)
class Matrices:
    """Those of one vector. All their P lie in one vector, a column after the other, and so do all their Q."""

    rank: int
    each: tuple[Matrix, ...] = ()

    @classmethod
    def among(cls, pieces: Sequence[Piece], rank: int) -> Matrices:
        """Those that lie there whole and whose P and Q have less than half of their elements."""
        found = []
        for piece in pieces:
            rows, columns = (piece.shape[0], prod(piece.shape[1:])) if len(piece.shape) > 1 else (1, 1)
            if piece.whole and 2 * rank * (rows + columns) < rows * columns:
                found.append(Matrix(piece.begin, rows, columns))
        return cls(rank, tuple(found))

    @property
    def left_length(self) -> int:
        """Elements of all P."""
        return self.rank * sum(m.rows for m in self.each)

    @property
    def right_length(self) -> int:
        """Elements of all Q."""
        return self.rank * sum(m.columns for m in self.each)

    def lefts(self, p: Tensor) -> list[Tensor]:
        """Each P', as a view."""
        return self._thin(p, [m.rows for m in self.each])

    def rights(self, q: Tensor) -> list[Tensor]:
        """Each Q', as a view."""
        return self._thin(q, [m.columns for m in self.each])

    def first_right(self, like: Tensor) -> Tensor:
        """The Q to begin with, for a vector like this: the same at every node, for it stands in for M' P."""
        drawn = [
            torch.randn(self.rank, m.columns, generator=stream(0, "low_rank", m.rows, m.columns))
            for m in self.each
        ]
        return orthonormal(drawn, like.new_empty(0, dtype=wide(like)))

    def left(self, v: Tensor, q: Tensor) -> Tensor:
        """M Q, in the dtype of Q."""
        pairs = zip(self.each, self.rights(q), strict=True)
        return joined((right @ m.of(v).to(q.dtype).T for m, right in pairs), q)

    def right(self, v: Tensor, p: Tensor) -> Tensor:
        """M' P, in the dtype of P."""
        pairs = zip(self.each, self.lefts(p), strict=True)
        return joined((left @ m.of(v).to(p.dtype) for m, left in pairs), p)

    def others(self, v: Tensor) -> Tensor:
        """The elements of a vector that lie in no matrix."""
        return joined((v[gap] for gap in self.gaps(v.numel())), v)

    def fill(self, out: Tensor, p: Tensor, q: Tensor, others: Tensor) -> Tensor:
        """The vector in which every matrix is P Q', and the rest of it is `others`; written into `out`."""
        for m, left, right in zip(self.each, self.lefts(p), self.rights(q), strict=True):
            if out.dtype == p.dtype:
                torch.mm(left.T, right, out=m.of(out))
            else:
                m.of(out).copy_(left.T @ right)
        return self.put_others(out, others)

    def put_others(self, out: Tensor, others: Tensor) -> Tensor:
        """Write what lies in no matrix into `out`."""
        gaps = self.gaps(out.numel())
        parts = torch.split(others, [gap.stop - gap.start for gap in gaps])
        for gap, part in zip(gaps, parts, strict=True):
            out[gap] = part
        return out

    def gaps(self, length: int) -> list[slice]:
        """Where a vector of that length has no matrix."""
        begins = [0, *(m.end for m in self.each)]
        ends = [*(m.begin for m in self.each), length]
        return [slice(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def _thin(self, factors: Tensor, sides: list[int]) -> list[Tensor]:
        parts = torch.split(factors, [side * self.rank for side in sides]) if sides else ()
        return [part.view(self.rank, -1) for part in parts]


def orthonormal(thin: Iterable[Tensor], like: Tensor) -> Tensor:
    """All of these P', or Q', with rows of length 1 at right angles to each other, in one vector like this.

    Rows of zeros become some that fit the others. So a gradient of zeros, whose Q is zeros, harms nothing
    that comes after it. In double precision, where no gradient is too small or too large.
    """
    return joined((torch.linalg.qr(factor.double().T).Q.T for factor in thin), like)


def joined(parts: Iterable[Tensor], like: Tensor) -> Tensor:
    """All of these in one vector, of the dtype and on the device of this one."""
    flat = [part.reshape(-1).to(like) for part in parts]
    return torch.cat(flat) if flat else like.new_empty(0)


def wide(v: Tensor) -> torch.dtype:
    """What is computed in: half precision would overflow."""
    return torch.promote_types(v.dtype, torch.float32)
