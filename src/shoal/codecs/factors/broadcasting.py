"""Averages of gradients out of what they are made of; sufficient-factor broadcasting, Xie et al. 2016.

The gradient of a fully connected layer of n x q is D' X, of K rows each; see `shoal.core.products`. Every
worker sends its D and X to all others, and each forms the average itself: sum_k w_k D_k' X_k / sum_k w_k. In
three steps:

1. All tell each other how many rows they have for each layer, and their weights.
2. By that all know which layers go as factors: those of which everybody has some, if P K (n + q) < 2 n q with
   the largest K. Then the busiest of P workers sends less, (P-1) K (n + q), than for an average in stripes,
   2 (P-1)/P n q. These are sent.
3. Everything else is averaged as it is. Meanwhile the factors arrive.

Nothing is lost: the average is the same but for rounding. It costs one more round of small messages, and
every worker the time to multiply all factors, which is P times that of its own layer's gradient. They all do
it in the same order, so they have the same bits where their machines and numbers of threads are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.averaging import Given, Reductions
from shoal.core.codec import expect
from shoal.core.errors import WireError
from shoal.core.matrices import Matrices, Matrix, wide
from shoal.core.products import Product, Records

TERMS, FACTORS = "terms", "factors"
"""Tags of how many rows a worker has for each layer, and of the rows: all D, then all X."""

UNKNOWN = -1
"""The number of rows for a layer whose gradient is not known to be a product."""


def pays(layer: Matrix, terms: int, workers: int) -> bool:
    """Whether so many rows, at the worker that has most, are less to send than the layer's own average."""
    return workers * terms * (layer.rows + layer.columns) < 2 * layer.rows * layer.columns


async def average_products(v: Tensor, records: Records, workers: Reductions) -> Tensor:
    """The average of a gradient, as factors where that pays."""
    own = Own.of(records, v, workers.weight, workers.size)
    await workers.give(TERMS, (torch.tensor(own.terms, dtype=torch.int64),))
    words = [heard(given, rank, len(own.layers)) for rank, given in enumerate(await workers.take(TERMS))]
    chosen = [n for n in range(len(own.layers)) if own.pays(n, words)]
    if not chosen:
        return await workers.mean(v)
    layers, mine = [own.layers[n] for n in chosen], [own.products[n] for n in chosen]
    matrices = Matrices(1, tuple(layers))  # for what is in none of them
    kinds = [p.errors for p in mine], [p.inputs for p in mine]
    errors, inputs = (torch.cat([part.reshape(-1) for part in kind]) for kind in kinds)
    await workers.give(FACTORS, (errors, inputs))
    rest = matrices.others(v)
    average = await workers.mean(rest) if rest.numel() else rest  # while the factors arrive
    by_worker = [  # in rank order, so that all round alike
        arrived(given, v, layers, [word.terms[n] for n in chosen])
        for given, word in zip(await workers.take(FACTORS), words, strict=True)
    ]
    out = matrices.put_others(v.new_empty(v.numel()), average)
    weights = [word.weight for word in words]
    for layer, *products in zip(layers, *by_worker, strict=True):
        fill(layer.of(out), products, weights)
    return out


@dataclass(frozen=True)
class Word:
    """What a worker says first: how many rows it has for each layer, and its weight."""

    terms: Sequence[int]
    weight: float


@dataclass(frozen=True)
class Own:
    """What one worker brings: a product for each layer, and of how many rows it says they are."""

    layers: Sequence[Matrix]
    products: Sequence[Product]
    terms: Sequence[int]

    @classmethod
    def of(cls, replica: Records, v: Tensor, weight: float, workers: int) -> Own:
        """For this vector. Products that are too long to be sent need not be looked at any further."""
        layers = replica.recorded
        products = replica.take_products(v)
        nothing = [Product.of([], layer, v) for layer in layers]
        if weight == 0:
            return cls(layers, nothing, [0] * len(layers))
        if products is None:
            return cls(layers, nothing, [UNKNOWN] * len(layers))
        terms = [
            p.terms if not pays(layer, p.terms, workers) or p.makes(layer.of(v)) else UNKNOWN
            for layer, p in zip(layers, products, strict=True)
        ]
        return cls(layers, products, terms)

    def pays(self, number: int, words: Sequence[Word]) -> bool:
        """Whether a layer goes as factors: all workers come to the same answer."""
        terms = [word.terms[number] for word in words]
        return UNKNOWN not in terms and pays(self.layers[number], max(terms), len(words))


def heard(given: Given, src: int, layers: int) -> Word:
    """The word of a worker; raises WireError if that cannot be."""
    terms = expect(given.parts, (torch.int64, layers))[0].tolist()
    if min(terms) < UNKNOWN:
        raise WireError(f"worker {src} says that it has {min(terms)} rows of factors; 0 is the least")
    return Word(terms, given.weight)


def arrived(given: Given, like: Tensor, layers: Sequence[Matrix], terms: Sequence[int]) -> list[Product]:
    """The factors of a worker, of as many rows as it has said; raises WireError if they are not."""
    rows = [k * layer.rows for layer, k in zip(layers, terms, strict=True)]
    columns = [k * layer.columns for layer, k in zip(layers, terms, strict=True)]
    parts = expect(given.parts, (like.dtype, sum(rows)), (like.dtype, sum(columns)))
    errors, inputs = (part.to(like.device) for part in parts)
    return [
        Product(d.view(-1, layer.rows), x.view(-1, layer.columns))
        for d, x, layer in zip(torch.split(errors, rows), torch.split(inputs, columns), layers, strict=True)
    ]


def fill(out: Tensor, products: Sequence[Product], weights: Sequence[float]) -> None:
    """Write the weighted average of all D' X to `out`: a single product of all rows below each other."""
    dtype, total = wide(out), sum(weights)
    errors = torch.cat([p.errors.to(dtype) * (w / total) for p, w in zip(products, weights, strict=True)])
    inputs = torch.cat([p.inputs.to(dtype) for p in products])
    if out.dtype == dtype:
        torch.mm(errors.T, inputs, out=out)
    else:
        out.copy_(errors.T @ inputs)
