"""ServedReplica: a server's slice of the model, with the user's optimizer to step it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.core.vector import Flat, take_in
from shoal.replicas.optimizer import (
    HOOKS_MISS,
    Schedule,
    copy_onto,
    has_hooks,
    is_plain_sgd,
    load_state,
    needs_closure,
    saved_state,
    steps_each_element,
)
from shoal.vocabulary.strategy import Strategy


class ServedReplica(Parameters):
    """The slice of a flat model that a server owns, and copies of the model's optimizers.

    A copy has its own state, for this slice alone. It steps with the learning rates and other numbers that
    came with the push.
    """

    def __init__(self, me: NodeIdentity, flat: Flat, *optimizers: torch.optim.Optimizer) -> None:
        own = me.own_slice(flat.x.numel())
        self._x = flat.x[own].clone()
        self._pieces: list[tuple[nn.Parameter, slice]] = []  # with their place in `x`
        self._within: dict[int, slice] = {}  # by the id of a piece: its place in the parameter
        pieces = {}
        for p, tensor, place in zip(flat.parameters, flat.tensors, flat.places, strict=True):
            begin, end = max(own.start, place.start), min(own.stop, place.stop)
            if begin < end:
                whole = end - begin == tensor.numel()
                piece = nn.Parameter(tensor.detach() if whole else tensor.detach().view(-1)[: end - begin])
                within = slice(begin - place.start, end - place.start)
                pieces[id(p)] = piece, partial(_part, within)
                self._within[id(piece)] = within
                self._pieces.append((piece, slice(begin - own.start, end - own.start)))
        self._bind()
        self._optimizers = [copy_onto(optimizer, pieces) for optimizer in optimizers]
        self._schedules = [Schedule(twin) for twin in self._optimizers]
        self._held = [{id(p) for group in o.param_groups for p in group["params"]} for o in self._optimizers]

    @property
    def x(self) -> Tensor:
        """The slice, which the optimizers' parameters are views on."""
        return self._x

    @x.setter
    def x(self, value: Tensor) -> None:
        self._x = value
        self._bind()

    def apply(self, g: Tensor, rate: float, numbers: Tensor | None, scale: float) -> None:
        """One step of an optimizer along -g, with these settings; learning rates times `scale`.

        Of several optimizers, the first of the numbers says which.
        """
        which = 0
        if len(self._optimizers) > 1 and numbers is not None:
            which, numbers = int(numbers[0]), numbers[1:]
        self._schedules[which].follow(rate, numbers, scale)
        for piece, place in self._pieces:
            part = g[place].view(piece.shape)
            if id(piece) in self._held[which]:
                piece.grad = part
            elif part.any():
                raise ValueError(
                    "a server got the gradients of several optimizers in one. Workers that a server waits "
                    "for must step the same optimizers in the same order, and push at every step."
                )
        self._optimizers[which].step()
        bound = zip(self._pieces, self._addresses, strict=True)
        take_in(self._x, ((piece, place, address) for (piece, place), address in bound))

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' states."""
        states = [saved_state(optimizer) for optimizer in self._optimizers]
        return {"optimizers": states, "schedules": [schedule.state() for schedule in self._schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            load_state(optimizer, own)
        for schedule, numbers in zip(self._schedules, state["schedules"], strict=True):
            schedule.load(numbers)

    def cut(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this slice, of the states of other slices that make up the whole vector, in order."""
        optimizers = [
            self._cut(optimizer, [state["optimizers"][i] for state in states])
            for i, optimizer in enumerate(self._optimizers)
        ]
        return {"optimizers": optimizers, "schedules": states[0]["schedules"]}

    def _cut(self, optimizer: torch.optim.Optimizer, states: Sequence[dict[int, Any]]) -> dict[int, Any]:
        """The state of an optimizer that steps each element by itself: each tensor in it is cut alike."""
        held = enumerate(p for group in optimizer.param_groups for p in group["params"])
        own = {}
        for n, piece in held:
            parts = [state[n] for state in states if n in state]
            if parts and id(piece) in self._within:
                own[n] = {name: self._joined(piece, [part[name] for part in parts]) for name in parts[0]}
        return own

    def _joined(self, piece: nn.Parameter, values: Sequence[Any]) -> Any:
        """What one slice has of a value that each slice has of a parameter; counts are the same for all."""
        if not isinstance(values[0], Tensor):
            return values[0]
        if not values[0].dim():
            return values[0].clone()
        whole = torch.cat([value.reshape(-1) for value in values])
        return whole[self._within[id(piece)]].view(piece.shape)

    def _bind(self) -> None:
        for piece, place in self._pieces:
            piece.data = self._x[place].view(piece.shape)
        self._addresses = [piece.data_ptr() for piece, _ in self._pieces]


def _part(part: slice, value: Tensor) -> Tensor:
    return value.reshape(-1)[part]


def check_optimizer(strategy: Strategy, optimizer: torch.optim.Optimizer, workers: int, shards: int) -> None:
    """Raise ValueError for an optimizer that this strategy could not run as it is."""
    name, here = type(optimizer).__name__, type(strategy).__name__
    _check_own_rule(strategy, optimizer)
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
    if strategy.steps_at_server and has_hooks(optimizer):
        raise ValueError(f"{here} {HOOKS_MISS}")
    if strategy.steps_at_server and shards > 1 and not steps_each_element(optimizer):
        raise ValueError(
            f"{name} looks at whole tensors, and each of {shards} servers has a slice of the model, which "
            "may cut them; take --servers 1"
        )


def _check_own_rule(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for options that the strategy's own rule would ignore, however few the workers."""
    name, here = type(optimizer).__name__, type(strategy).__name__
    if strategy.own_optimizer and any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError(
            f"{here} takes its steps without the optimizer, so the weight_decay of {name} would do nothing; "
            "take weight_decay=0, and the option of the strategy, l2 or weight_decay"
        )
    if strategy.one_rate and len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
        rule = f"the server's rule of {here}" if strategy.servers else f"the rule of {here}"
        way = (
            "leave out its option optimizer, to run your own there"
            if strategy.servers
            else "take one for all"
        )
        raise ValueError(f"{rule} has one learning rate, and the groups of {name} have several; {way}")
