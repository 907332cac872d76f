"""The user's optimizer at a server: copied onto the tensors there, and kept to its owner's schedule."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shoal.replicas.local_shards import local, sharded

Numbers = list[float]

OF_GRAD_SCALER = ("grad_scale", "found_inf")
"""Attributes that torch.amp.GradScaler sets at an optimizer for the time of a step."""


HOOKS_MISS = (
    "runs the optimizer at the server, where step hooks and a step() of your own would not see your model; "
    "clip or change gradients in your loop, before step()"
)
"""What is wrong with them, and what to do."""


class Schedule:
    """The numbers in the groups of an optimizer: learning rates, betas, weight decay.

    A worker's push carries its numbers to the servers, whose optimizers step with them. Nodes that run the
    same script have the same groups, so numbers are told apart by their order alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [
            [name for name, value in group.items() if name != "params" and is_numeric(value)]
            for group in optimizer.param_groups
        ]
        self._others = [
            [name for name in group if name != "params" and name not in names]
            for group, names in zip(optimizer.param_groups, self._names, strict=True)
        ]
        self._attributes = [
            name for name in vars(optimizer) if not name.startswith("_") and name not in OF_GRAD_SCALER
        ]
        self._settings = self._read_settings()
        self._start = self._read()
        self._followed = list(self._start)
        self._first_rate = self._place_of_first_rate()

    def changed(self) -> Tensor | None:
        """All numbers, if others than the first rate have changed since the start; a push tells that anyway.

        Raises ValueError if something else than a number was changed, or a step hook registered.
        """
        if has_step_hooks(self._optimizer):
            raise ValueError(f"this strategy {HOOKS_MISS}")
        if self._read_settings() != self._settings:
            raise ValueError(
                "an attribute of the optimizer, or an option that is not a number, was changed after "
                "attach(), which the servers cannot follow. Set it before attach()."
            )
        if self._without_first_rate(self._read()) == self._without_first_rate(self._start):
            return None
        return self.numbers()

    def numbers(self) -> Tensor:
        """All numbers."""
        return torch.tensor(self._read(), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """The numbers, and those that were taken over last."""
        return {"now": self.numbers(), "followed": torch.tensor(self._followed, dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        coming = iter(state["now"].tolist())
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            for name in names:
                group[name] = like(group[name], coming)
        self._followed = state["followed"].tolist()

    def follow(self, rate: float, numbers: Tensor | None, scale: float = 1.0) -> None:
        """Take over what a push carried, with every learning rate times `scale`.

        Other numbers only where the sender changed them: the optimizer may change some itself, as a counter.
        """
        values = list(self._start) if numbers is None else numbers.tolist()
        if numbers is None and self._first_rate is not None:
            values[self._first_rate] = rate
        at = 0
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            for name in names:
                length = len(flat_numbers(group[name]))
                new, old = values[at : at + length], self._followed[at : at + length]
                if name == "lr" or new != old:
                    group[name] = like(group[name], iter(new), scale if name == "lr" else 1.0)
                at += length
        self._followed = values

    def _place_of_first_rate(self) -> int | None:
        """Where the first group's learning rate is among all numbers; None where it has none."""
        group, names = self._optimizer.param_groups[0], self._names[0]
        if "lr" not in names:
            return None
        return sum(len(flat_numbers(group[name])) for name in names[: names.index("lr")])

    def _without_first_rate(self, numbers: Numbers) -> Numbers:
        at = self._first_rate
        return numbers if at is None else numbers[:at] + numbers[at + 1 :]

    def _read(self) -> Numbers:
        return [
            number
            for group, names in zip(self._optimizer.param_groups, self._names, strict=True)
            for name in names
            for number in flat_numbers(group[name])
        ]

    def _read_settings(self) -> list[dict[str, Any]]:
        """The options that are not numbers, and the optimizer's own plain attributes."""
        plain = (bool, int, float, str, type(None))
        options = [
            {name: group[name] for name in names if isinstance(group[name], (*plain, tuple, dict))}
            for group, names in zip(self._optimizer.param_groups, self._others, strict=True)
        ]
        own = vars(self._optimizer)
        return [*options, {name: own[name] for name in self._attributes if isinstance(own.get(name), plain)}]


def is_numeric(value: Any) -> bool:
    """Whether an option is a number, or numbers."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(is_numeric(element) for element in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flat_numbers(value: Any) -> Numbers:
    """The numbers in an option."""
    if isinstance(value, (tuple, list)):
        return [number for element in value for number in flat_numbers(element)]
    return [float(value)]


def like(old: Any, coming: Iterator[float], scale: float = 1.0) -> Any:
    """The next of the coming numbers, as the same kind of value as the old one."""
    if isinstance(old, (tuple, list)):
        return type(old)(like(element, coming, scale) for element in old)
    number = next(coming) * scale if scale != 1.0 else next(coming)
    if isinstance(old, Tensor):
        return old.fill_(number)
    return int(number) if isinstance(old, int) and number.is_integer() else number


Piece: TypeAlias = "tuple[nn.Parameter, Callable[[Tensor], Tensor]]"
"""What takes a parameter's place, and which part of a tensor of that parameter's shape belongs to it."""


def copy_onto(optimizer: torch.optim.Optimizer, pieces: Mapping[int, Piece]) -> torch.optim.Optimizer:
    """A copy of `optimizer`, state included, that steps other tensors: by the id of a parameter, its piece.

    A parameter without a piece is replaced by an empty tensor, which never has a gradient.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {
        id(p): pieces[id(p)][0] if id(p) in pieces else nn.Parameter(local(p).new_empty(0)) for p in held
    }
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name != "step":  # a learning-rate scheduler has wrapped the original's
            vars(twin)[name] = copy.deepcopy(value, memo)
    for p in held:
        state: dict[str, Any] = twin.state.get(memo[id(p)], {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == p.shape and id(p) in pieces:
                piece, cut = pieces[id(p)]
                state[name] = cut(local(value)).view(piece.shape).clone()
    return twin


def _each(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The state of one parameter with its tensors changed."""
    if not isinstance(values, dict):
        return values
    return {name: change(v) if isinstance(v, Tensor) else v for name, v in values.items()}


def saved_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The "state" of its `state_dict`; of DTensors the local shards."""
    state: dict[str, Any] = optimizer.state_dict()["state"]
    return {key: _each(local, values) for key, values in state.items()}


def load_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """Restore a `saved_state`, and leave the options of its groups as they are."""
    held = enumerate(p for group in optimizer.param_groups for p in group["params"])
    cut = {n: _each(partial(sharded, p=p), state[n]) for n, p in held if n in state}
    state = {**state, **cut}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def steps_each_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an element depends on that element alone, so that a tensor may be cut.

    Tried out: a small matrix in two pieces is stepped as the whole is, in every group.
    """
    start, *gradients = _samples()
    first, second = slice(0, 10), slice(10, 24)
    try:
        whole = _moved(optimizer, start, gradients)
        cut = [
            _moved(optimizer, start.flatten()[part], [g.flatten()[part] for g in gradients])
            for part in (first, second)
        ]
    except Exception:  # whatever an optimizer raises that does not take vectors
        return False
    return bool(whole.any()) and torch.allclose(whole, torch.cat(cut, dim=1), rtol=1e-3, atol=1e-5)


def steps_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether zeros for a gradient are another step than no gradient, as by momentum or weight decay.

    Tried out on a small matrix in every group.
    """
    start, first, second, last = _samples()
    try:
        with_zeros = _moved(optimizer, start, [first, second * 0, last])
        with_none = _moved(optimizer, start, [first, None, last])
    except Exception:  # whatever an optimizer raises that does not take this matrix: nobody knows
        return True
    return not torch.equal(with_zeros, with_none)


def _samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator) for _ in range(4)]


def _moved(optimizer: torch.optim.Optimizer, start: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
    """How far a copy of the optimizer moves a small tensor, elements in order; a row for each group."""
    firsts = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    pieces = [nn.Parameter(start.to(local(p), copy=True)) for p in firsts]

    def uniform(state: Tensor) -> Tensor:
        return state.flatten()[:1].expand(start.numel())

    twin = copy_onto(optimizer, {id(p): (piece, uniform) for p, piece in zip(firsts, pieces, strict=True)})
    for group in twin.param_groups:
        group["lr"] = 0.1  # it may be tiny, or 0 before a warm-up: then nothing would be seen
    for g in gradients:
        for piece in pieces:
            piece.grad = None if g is None else g.to(piece)
        twin.step()
    return torch.stack([(piece.detach() - start.to(piece)).flatten() for piece in pieces])


def describe_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Its class and all plain options of its groups, one in a line."""
    name, plain = type(optimizer).__name__, (bool, int, float, str, tuple, list, Tensor, type(None))
    return [
        f"{option}={group[option]} ({name}, group {number})"
        for number, group in enumerate(optimizer.param_groups)
        for option in sorted(group)
        if option != "params" and isinstance(group[option], plain)
    ]


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is `x -= lr * g`, with one learning rate for all."""
    group, plain = optimizer.param_groups[0], {"momentum": 0, "weight_decay": 0, "maximize": False}
    return (
        type(optimizer) is torch.optim.SGD
        and len(optimizer.param_groups) == 1
        and all(group[name] == value for name, value in plain.items())
    )


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else's code runs at its steps: hooks, or a step that no scheduler has wrapped."""
    own_step = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return own_step or has_step_hooks(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after its steps."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, None) for name in hooks)


def has_inner(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it wraps another optimizer, whose state is not among its own."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step must be given the loss to evaluate, as that of L-BFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that it steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_are_of(model: nn.Module, held: Sequence[Tensor]) -> None:
    """Raise ValueError unless these are parameters of the model, each held once."""
    ours, trained = {id(p) for p in model.parameters()}, {id(p) for p in held if p.requires_grad}
    if len(trained) < sum(p.requires_grad for p in held):
        raise ValueError("a parameter is held by two optimizers; leave it to one")
    if not ours & trained:
        raise ValueError(
            "the optimizer holds none of the model's trainable parameters; build it from model.parameters()"
        )
    if trained - ours:
        raise ValueError(
            f"the optimizer also holds {len(trained - ours)} parameters that are not the model's: they "
            "would differ between workers. Attach all models that are trained: attach([model, other], "
            "optimizer)."
        )
