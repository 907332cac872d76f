"""ServedReplica: a server's slice of the model, with the user's optimizer to step it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.core.vector import Flat
from shoal.replicas.optimizer import Schedule, copy_onto, is_plain_sgd, needs_closure, steps_each_element
from shoal.vocabulary.strategy import Strategy


class ServedReplica(Parameters):
    """The slice of a flat model that a server owns, and a copy of the model's optimizer.

    The copy has its own state, for this slice alone. It steps with the learning rates and other numbers that
    came with the push.
    """

    def __init__(self, me: NodeIdentity, flat: Flat, optimizer: torch.optim.Optimizer) -> None:
        own = me.own_slice(flat.x.numel())
        self._places: list[slice] = []  # of each piece in `x`
        self._pieces: list[nn.Parameter] = []
        self._x = flat.x[own].clone()
        pieces = {}
        for p, place in zip(flat.parameters, flat.places, strict=True):
            begin, end = max(own.start, place.start), min(own.stop, place.stop)
            if begin < end:
                whole = end - begin == p.numel()
                piece = nn.Parameter(p.detach() if whole else p.detach().view(-1)[: end - begin])
                pieces[id(p)] = piece, partial(_part, slice(begin - place.start, end - place.start))
                self._places.append(slice(begin - own.start, end - own.start))
                self._pieces.append(piece)
        self._bind()
        self._optimizer = copy_onto(optimizer, pieces)
        self._schedule = Schedule(self._optimizer)

    @property
    def x(self) -> Tensor:
        """The slice, which the optimizer's parameters are views on."""
        return self._x

    @x.setter
    def x(self, value: Tensor) -> None:
        self._x = value
        self._bind()

    def apply(self, g: Tensor, rate: float, numbers: Tensor | None, scale: float) -> None:
        """One step of the optimizer along -g, with these settings; learning rates times `scale`."""
        self._schedule.follow(rate, numbers, scale)
        for piece, part in zip(self._pieces, self._cut(g), strict=True):
            piece.grad = part
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return {"optimizer": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})

    def _bind(self) -> None:
        for piece, part in zip(self._pieces, self._cut(self._x), strict=True):
            piece.data = part

    def _cut(self, vector: Tensor) -> Iterator[Tensor]:
        """The part of each parameter in a vector, in its shape where all of it is there."""
        for piece, place in zip(self._pieces, self._places, strict=True):
            yield vector[place].view(piece.shape)


def _part(part: slice, value: Tensor) -> Tensor:
    return value.reshape(-1)[part]


def check_optimizer(strategy: Strategy, optimizer: torch.optim.Optimizer, workers: int, shards: int) -> None:
    """Raise ValueError for an optimizer that this strategy could not run as it is."""
    name, here = type(optimizer).__name__, type(strategy).__name__
    if workers == 1 and not strategy.servers:
        return
    if needs_closure(optimizer):
        raise ValueError(
            f"{name} evaluates its closure several times in a step, each time on the batch of one worker: it "
            "trains on one worker, without a server; take another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam steps the rows that a sparse gradient has, and workers exchange whole gradients; "
            "take Adagrad or SGD, which step alike with both, or dense embeddings and Adam"
        )
    if strategy.plain_sgd_only and not is_plain_sgd(optimizer):
        raise ValueError(
            f"{here} takes every step itself, as plain SGD with one learning rate, and the optimizer is "
            f"{name} with other options; take strategy 'asgd', whose server runs any optimizer"
        )
    if strategy.steps_at_server and shards > 1 and not steps_each_element(optimizer):
        raise ValueError(
            f"{name} looks at whole tensors, and each of {shards} servers has a slice of the model, which "
            "may cut them; take --servers 1"
        )
