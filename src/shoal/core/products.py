"""Factors: the gradient of a fully connected layer as the product that it is.

y = W x, with W of n x q. Every sample that goes through the layer adds the outer product of the error at its
output and its input to the gradient. So K of them make D' X, with their errors in the rows of D, K x n, and
their inputs in the rows of X, K x q: K (n + q) numbers instead of n q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import sqrt
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.core.matrices import Matrix, wide
from shoal.core.seeds import stream
from shoal.core.vector import Flat

SLACK = 4.0
"""How many times further than expected rounding may lead two ways to compute the same sum apart."""

Uses: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""What a layer was used for: the errors at its output, and the inputs, of any shape but for the last side."""


@dataclass(frozen=True)
class Product:
    """A gradient as D' X."""

    errors: Tensor  # D, K x n
    inputs: Tensor  # X, K x q

    @classmethod
    def of(cls, uses: Uses, layer: Matrix, like: Tensor) -> Product:
        """What a layer's uses come to: each adds its own terms to the sum. No use is a sum of none."""
        errors = [d.detach().reshape(-1, layer.rows).to(like) for d, _ in uses]
        inputs = [x.reshape(-1, layer.columns).to(like) for _, x in uses]
        if not uses:
            return cls(like.new_empty(0, layer.rows), like.new_empty(0, layer.columns))
        return cls(errors[0], inputs[0]) if len(uses) == 1 else cls(torch.cat(errors), torch.cat(inputs))

    @property
    def terms(self) -> int:
        """K."""
        return len(self.errors)

    def makes(self, gradient: Tensor) -> bool:
        """Whether this matrix is D' X but for rounding; False for what is not finite.

        Both are multiplied with a vector drawn at random, in which no difference hides. That reads the
        gradient once, where to form D' X would take K times as long.
        """
        d, x, g = (part.to(wide(gradient)) for part in (self.errors, self.inputs, gradient))
        probe = _probe(g.shape[1]).to(g)
        seen, made = g @ probe, d.T @ (x @ probe)
        size = (d.square().T @ (x.square() @ probe.square())).sqrt()
        rounding = torch.finfo(g.dtype).eps * sqrt(self.terms + g.shape[1]) * (size + seen.abs())
        if gradient.dtype != g.dtype:  # sums are formed in single precision, and rounded once
            rounding += torch.finfo(gradient.dtype).eps * (g.square() @ probe.square()).sqrt()
        return bool(((seen - made).abs() <= SLACK * rounding).all())


@runtime_checkable
class Records(Protocol):
    """A replica that can tell what its gradients are made of."""

    def record(self) -> None:
        """Keep from now on what each gradient is made of, until it is taken or the next one is computed."""
        ...

    @property
    def recorded(self) -> Sequence[Matrix]:
        """The layers of which that is kept, in the order of the vector; none before `record`."""
        ...

    def take_products(self, v: Tensor) -> list[Product] | None:
        """What the layers of `v` are made of; None if `v` is not the last gradient as it was handed out.

        To be trusted after `Product.makes` only: others may have added to a gradient, or changed it.
        """
        ...


class Recorder:
    """Keeps what the fully connected layers of a module are given, and what comes back to them.

    A layer that is used several times, or whose weight several layers share, has the terms of all its uses.
    The module is left as it was between two recordings.
    """

    def __init__(self, module: nn.Module, flat: Flat) -> None:
        number = {id(p): n for n, p in enumerate(flat.parameters)}
        found = [
            (number[id(m.weight)], m)
            for m in module.modules()
            if type(m) is nn.Linear and id(m.weight) in number  # others may compute something else
        ]
        own = sorted({n for n, _ in found})
        self.layers = [Matrix(flat.places[n].start, *flat.parameters[n].shape) for n in own]
        self._modules = [(own.index(n), m) for n, m in found]
        self._uses: list[Uses] = [[] for _ in own]
        self._vector: Tensor | None = None
        self._version = -1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens meanwhile, which is to be one pass through the module and back."""
        self._vector, self._uses = None, [[] for _ in self.layers]
        hooks = [  # before all others, which may change the output
            m.register_forward_hook(partial(_see, self._uses[n]), prepend=True, with_kwargs=True)
            for n, m in self._modules
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def belongs_to(self, v: Tensor) -> None:
        """What was recorded last is about this gradient, as it is now."""
        self._vector, self._version = v, v._version

    def take(self, v: Tensor) -> list[Product] | None:
        """See `Records.take_products`."""
        uses, self._uses = self._uses, [[] for _ in self.layers]
        before, self._vector = self._vector, None
        if v is not before or v._version != self._version:
            return None
        return [Product.of(use, layer, v) for use, layer in zip(uses, self.layers, strict=True)]


def _see(uses: Uses, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: object) -> None:
    """A layer was used: keep its input, together with the error if one comes back."""
    if isinstance(output, Tensor) and output.requires_grad:
        inputs: Tensor = (args[0] if args else named["input"]).detach()
        output.register_hook(lambda error: uses.append((error, inputs)))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _probe(length: int) -> Tensor:
    return torch.randn(length, generator=stream(0, "factors", length))
