"""The two-loop recursion of L-BFGS (Nocedal 1980), once for vectors and for their coefficients.

`two_loop` needs sums, multiples and a dot product, and no more. With tensors it is the classical recursion:
2h dot products and 2h additions of vectors. With `Combination`, which names vectors that are somewhere else,
and a `Gram` matrix of their products, it is the vector-free form (Chen, Wang & Zhou 2014): only numbers are
multiplied here, and the direction comes out as one linear combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

V = TypeVar("V", bound="VectorLike")


class VectorLike(Protocol):
    """What the recursion does with a vector."""

    def __add__(self: V, other: V, /) -> V:
        """The sum."""
        ...

    def __sub__(self: V, other: V, /) -> V:
        """The difference."""
        ...

    def __mul__(self: V, factor: float, /) -> V:
        """The multiple."""
        ...


@dataclass(frozen=True)
class Pair(Generic[V]):
    """One step and what it did to the gradient: s = w_new - w, y = g_new - g."""

    s: V
    y: V


def two_loop(g: V, pairs: Sequence[Pair[V]], dot: Callable[[V, V], float]) -> V:
    """The direction -H g, where H is the inverse Hessian that the pairs, oldest first, stand for.

    Without pairs it is -g: steepest descent.
    """
    q, alphas = g, []
    for pair in reversed(pairs):
        alpha = dot(pair.s, q) / dot(pair.s, pair.y)
        alphas.append(alpha)
        q = q - pair.y * alpha
    r = q
    if pairs:
        newest = pairs[-1]
        r = r * (dot(newest.s, newest.y) / dot(newest.y, newest.y))
    for pair, alpha in zip(pairs, reversed(alphas), strict=True):
        beta = dot(pair.y, r) / dot(pair.s, pair.y)
        r = r + pair.s * (alpha - beta)
    return r * -1.0


@dataclass(frozen=True)
class Combination:
    """A sum of multiples of named vectors."""

    factors: Mapping[str, float]

    @classmethod
    def of(cls, name: str) -> Combination:
        """The vector of that name itself."""
        return cls({name: 1.0})

    def __add__(self, other: Combination) -> Combination:
        names = [*self.factors, *(name for name in other.factors if name not in self.factors)]
        return Combination({n: self.factors.get(n, 0.0) + other.factors.get(n, 0.0) for n in names})

    def __sub__(self, other: Combination) -> Combination:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Combination:
        return Combination({name: factor * own for name, own in self.factors.items()})


@dataclass
class Gram:
    """The dot products of named vectors."""

    products: dict[tuple[str, str], float] = field(default_factory=dict)

    def missing(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The products of these vectors that are not known, each once."""
        pairs = [(a, b) for place, a in enumerate(names) for b in names[place:]]
        return [pair for pair in pairs if pair not in self.products and pair[::-1] not in self.products]

    def learn(self, pairs: Iterable[tuple[str, str]], values: Iterable[float]) -> None:
        """Take in these products."""
        self.products.update(zip(pairs, values, strict=True))

    def forget(self, *names: str) -> None:
        """These vectors have changed."""
        self.products = {pair: v for pair, v in self.products.items() if not set(pair) & set(names)}

    def dot(self, a: Combination, b: Combination) -> float:
        """The dot product of two combinations."""
        return sum(
            one * other * self._product(name, named)
            for name, one in a.factors.items()
            for named, other in b.factors.items()
            if one and other
        )

    def _product(self, a: str, b: str) -> float:
        found = self.products.get((a, b))
        return self.products[b, a] if found is None else found
