"""A module's parameters and gradients as flat vectors; Layout maps slices to layers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

REPLICATED = "_shoal_replicated_over"
"""The attribute of a parameter that holds the group of processes which all have it whole."""

NO_SHARDS: Mapping[int, nn.Parameter] = MappingProxyType({})


EMBEDDING = re.compile(r"(.*_)?(emb|embed|embedder|embeddings?)(_.*)?|wte|wpe|pos")
"""A dotted part of the name of an embedding's parameter."""


@dataclass(frozen=True)
class Piece:
    """A parameter, or the part of it that lies in a slice of the flat vector."""

    name: str
    shape: torch.Size  # of the whole parameter
    begin: int  # in the slice
    end: int
    whole: bool  # whether all of it lies there

    @property
    def size(self) -> int:
        """Elements."""
        return self.end - self.begin

    @property
    def is_embedding(self) -> bool:
        """Whether its name says so."""
        return any(map(EMBEDDING.fullmatch, self.name.split(".")))

    @property
    def kind(self) -> str:
        """bias, or by its dimensions: vector, matrix, kernel."""
        if self.name.rpartition(".")[2] == "bias":
            return "bias"
        return ("vector", "vector", "matrix")[len(self.shape)] if len(self.shape) < 3 else "kernel"


@dataclass(frozen=True)
class Layout:
    """Which slice of the flat vector is which parameter, in the module's own order."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements of the whole vector."""
        return sum(self.sizes)

    @property
    def layers(self) -> list[slice]:
        """Where each layer lies: the parameters that belong to one module and follow each other."""
        return layers_of(self.pieces(0, self.numel))

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """What lies in that slice of the vector, in order."""
        found, start = [], 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            first, last = max(begin, start), min(end, start + size)
            if first < last:
                found.append(Piece(name, shape, first - begin, last - begin, last - first == size))
            start += size
        return found

    def manifest(self, dtype: torch.dtype) -> str:
        """One line that differs for models whose vectors are not the same thing."""
        text = ";".join(f"{name}{tuple(shape)}" for name, shape in zip(self.names, self.shapes, strict=True))
        return f"{self.numel} x {dtype} sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def locate(self, place: int) -> str:
        """How people call the element at that place of the vector."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if place < size:
                return f"element {place} of '{name}'"
            place -= size
        raise IndexError(f"the vector has {self.numel} elements")

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views on `vector`, by parameter name and in the parameter's shape."""
        pieces = torch.split(vector, self.sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}


def trainable(
    module: nn.Module, held: Set[int] | None = None, shards: Mapping[int, nn.Parameter] = NO_SHARDS
) -> tuple[list[nn.Parameter], Layout]:
    """The parameters that take part in training, checked to fit one flat vector.

    `held` has the ids of those that the optimizer holds, if it may not hold all. `shards` has, by the id of
    a parameter, the part of it that this process holds; the layout is then that of the parts.
    """
    named = [
        (name, p)
        for name, p in module.named_parameters()
        if p.requires_grad and (held is None or id(p) in held)
    ]
    if not named:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameters: there is nothing to train. "
            "Check that its layers are attributes of the module and that requires_grad is set."
        )
    for what, values in (
        ("devices", {str(p.device) for _, p in named}),
        ("dtypes", {str(p.dtype).removeprefix("torch.") for _, p in named}),
    ):
        if len(values) > 1:
            raise ValueError(
                f"the parameters of {type(module).__name__} are on several {what} "
                f"({', '.join(sorted(values))}); move them all to one with module.to(...)."
            )
    _check_memory(module, {id(p) for _, p in named}, shards)
    shapes = tuple(shards.get(id(p), p).shape for _, p in named)
    return [p for _, p in named], Layout(tuple(n for n, _ in named), shapes)


def _check_memory(module: nn.Module, trained: Set[int], shards: Mapping[int, nn.Parameter]) -> None:
    """Raise ValueError if a trained parameter shares elements with another tensor of the module.

    Each gets a place of its own in the flat vector, so that the two would come apart.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    spans = [(*_span(shards.get(id(t), t)), id(t) in trained, name) for name, t in tensors]
    reached, is_trained, name = 0, False, ""
    for begin, end, its_trained, its_name in sorted(spans):
        if begin < reached and (is_trained or its_trained):
            raise ValueError(
                f"{name!r} and {its_name!r} share memory, and would come apart in training: tie parameters "
                "by giving both names one Parameter (head.weight = emb.weight); let a buffer be a copy"
            )
        if end > reached:
            reached, is_trained, name = end, its_trained, its_name


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in memory; nowhere if it has none, or not all that lies between."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if not tensor.numel() or 1 + sum((n - 1) * step for n, step in steps) != tensor.numel():
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def named_weights(
    module: nn.Module, vector: Tensor, parameters: Sequence[nn.Parameter] | None = None
) -> dict[str, Tensor]:
    """What `module.state_dict()` is with these parameters, by default all trainable ones, from `vector`."""
    parts = trainable(module)[0] if parameters is None else parameters
    pieces = {
        id(p): piece.view(p.shape)
        for p, piece in zip(parts, torch.split(vector, [p.numel() for p in parts]), strict=True)
    }
    named = module.named_parameters(remove_duplicate=False)
    return {**module.state_dict(), **{name: pieces[id(p)] for name, p in named if id(p) in pieces}}


def replicate(module: nn.Module, group: Any) -> None:
    """Say that the processes of a group hold the same parameters here: `attach(mesh=)` keeps them alike.

    It knows by itself where a mesh holds DTensors.
    """
    for p in module.parameters():
        setattr(p, REPLICATED, group)


def is_statistic(name: str, buffer: Tensor) -> bool:
    """Whether a buffer is a running statistic, as those of BatchNorm: these are averaged over workers.

    Keras keeps them as parameters that nobody trains, and calls them moving_mean and moving_variance.
    """
    last = name.replace("/", ".").rpartition(".")[2]
    return buffer.is_floating_point() and last.startswith(("running_", "moving_"))


def named_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module, and the running statistics that it keeps as parameters nobody trains."""
    frozen = ((name, p.detach()) for name, p in module.named_parameters() if not p.requires_grad)
    return [*module.named_buffers(), *((name, p) for name, p in frozen if is_statistic(name, p))]


class Flat:
    """A module whose parameters are views on one vector `x`: change `x` and the module changes.

    Where a parameter has a shard, the shard is the view; its owner copies between the two.
    """

    def __init__(
        self,
        module: nn.Module,
        held: Set[int] | None = None,
        shards: Mapping[int, nn.Parameter] = NO_SHARDS,
    ) -> None:
        self.parameters, self.layout = trainable(module, held, shards)
        self.tensors = [shards.get(id(p), p) for p in self.parameters]  # the views on `x`
        first = self.tensors[0]
        self.x = torch.empty(self.layout.numel, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for p, view in zip(self.tensors, self.layout.split(self.x).values(), strict=True):
                view.copy_(p)
                p.data = view
        sizes = self.layout.sizes
        self.places = [
            slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]  # of each parameter in `x`
        self.active: Set[int] | None = None  # of the parameters: whose gradients count; None: all
        self._addresses = [p.data_ptr() for p in self.tensors]
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()  # vector -> the parameters in it

    def parts(self, nbytes: int) -> list[slice]:
        """Slices of whole parameters from the end of `x` to its beginning, each of at least so many bytes.

        Back-propagation comes to them in about this order.
        """
        parts, stop = [], self.x.numel()
        for place in reversed(self.places):
            if (stop - place.start) * self.x.element_size() >= nbytes or stop > place.start == 0:
                parts.append(slice(place.start, stop))
                stop = place.start
        return parts

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parameters in a vector: the same tensors again for the same vector, as long as it lives."""
        if vector not in self._views:  # of `data`, so that torch counts the changes of each by itself
            self._views[vector] = [view.data for view in self.layout.split(vector).values()]
        views: list[Tensor] = self._views[vector]
        return views

    def gradient(self, out: Tensor) -> Tensor:
        """Copy the gradients that back-propagation left into `out`; a parameter without one has zeros."""
        for n, (p, view) in enumerate(zip(self.tensors, self.views(out), strict=True)):
            if p.grad is None or not self.is_active(n):
                view.zero_()
            elif p.grad.is_sparse:
                view.copy_(p.grad.to_dense())
            elif p.grad.data_ptr() != view.data_ptr():  # else it was accumulated there
                view.copy_(p.grad)
        return out

    def set_gradient(self, g: Tensor) -> None:
        """Make every parameter's gradient a view on `g`, for an optimizer to see; not of one frozen since.

        Where only some count it is a copy: `g` is written again before the gradients of the others are read.
        """
        for n, (p, view) in enumerate(zip(self.tensors, self.views(g), strict=True)):
            if self.is_active(n):
                seen = view if self.active is None else view.clone()
                p.grad = seen if p.requires_grad else None

    def drop_gradients(self) -> None:
        """Forget what back-propagation left."""
        for p in self.parameters:
            p.grad = None

    def is_active(self, number: int) -> bool:
        """Whether the gradient of that parameter counts."""
        return self.active is None or number in self.active

    def take_in(self) -> None:
        """Have parameters be views on `x` again where an optimizer gave them new tensors (`p.data = ...`)."""
        take_in(self.x, zip(self.tensors, self.places, self._addresses, strict=True))

    def check_still_bound(self) -> None:
        """Raise if somebody gave the module other storage, as `module.to()` and `module.half()` do."""
        if [p.data_ptr() for p in self.tensors] != self._addresses:
            raise ValueError(
                "the module's parameters were moved after Shoal took hold of them; "
                "call module.to(device) or module.half() before."
            )


def take_in(x: Tensor, bound: Iterable[tuple[Tensor, slice, int]]) -> None:
    """Have parameters be views on `x` again, with the values of what they were given instead.

    Each comes with its place in `x` and its address there.
    """
    for p, place, address in bound:
        if p.data_ptr() != address:
            view = x[place].view(p.shape)
            view.copy_(p.data)
            p.data = view


def layers_of(pieces: Sequence[Piece]) -> list[slice]:
    """Where each layer lies: the pieces that belong to one module and follow each other."""
    layers: list[slice] = []
    before = None
    for piece in pieces:
        module = piece.name.rpartition(".")[0]
        begin = layers.pop().start if module == before and layers else piece.begin
        layers.append(slice(begin, piece.end))
        before = module
    return layers


def describe_flaw(vector: Tensor, layout: Layout | None = None, begins: int = 0) -> str | None:
    """Which element of a vector is not finite, and its value; None if all are finite.

    `begins` is where the vector lies in the model's, whose parameters `layout` names.
    """
    place = first_bad(vector)
    if place is None:
        return None
    element = f"element {begins + place}" if layout is None else layout.locate(begins + place)
    return f"{element} is {float(vector[place])}"


def first_bad(vector: Tensor) -> int | None:
    """The index of the first element that is not finite; None if all are finite."""
    if isfinite(vector.sum().item()):  # one pass at the speed of memory; NaN and infinity stick
        return None
    bad = (~torch.isfinite(vector)).nonzero()
    return int(bad[0]) if len(bad) else None  # else only the sum was too large


def fragments(whole: int, number: int, layout: Layout | None = None) -> list[list[slice]]:
    """A vector of `whole` elements in parts: fragment k is every `number`-th layer from the k-th on.

    Equal slices where the layout is unknown or has fewer layers. Raises ValueError if there are fewer
    elements than fragments.
    """
    if number > whole:
        raise ValueError(f"{whole} elements cannot be cut into {number} fragments")
    layers = layout.layers if layout is not None and number > 1 else []
    if len(layers) >= number:
        return [layers[k::number] for k in range(number)]
    return [[slice(k * whole // number, (k + 1) * whole // number)] for k in range(number)]
