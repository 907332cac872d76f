"""Stepper: one of the optimizers of the user's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.core.vector import Flat
from shoal.replicas.optimizer import (
    Schedule,
    flat_numbers,
    held_by,
    is_numeric,
    like,
    load_state,
    saved_state,
)


class Stepper:
    """One of the user's optimizers, and what its next step needs."""

    def __init__(self, optimizer: torch.optim.Optimizer, flat: Flat) -> None:
        held = held_by(optimizer)
        ids = {id(p) for p in held}
        self.optimizer = optimizer
        self.step: Callable[..., Any] = optimizer.step  # as it was before attach()
        self.schedule = Schedule(optimizer)
        self.indices = frozenset(n for n, p in enumerate(flat.parameters) if id(p) in ids)
        self.samples = 0  # since its last step; 0 if the loop does not report them, and then counted as 1
        self.closure: tuple[Callable[[], Any], ...] = ()  # where it evaluates the loss itself
        self._state = optimizer.state
        self._moved: set[tuple[int, str]] = set()  # numbers in its groups that its own steps have changed
        self._held = [id(p) for p in held]
        self._frozen = [p for p in held if not p.requires_grad]

    def take(self) -> Any:
        """Take a step; returns what the optimizer did."""
        before = self._numbers()
        returned = self.step(*self.closure)
        self._moved.update(place for place, value in self._numbers().items() if value != before.get(place))
        return returned

    def state(self) -> dict[str, Any]:
        """What the optimizer remembers of its steps, also among the options of its groups."""
        numbers = self._numbers()
        moved = [[*place, numbers[place]] for place in sorted(self._moved & numbers.keys())]
        return {"state": saved_state(self.optimizer), "moved": moved}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Options that no step has moved stay as they are."""
        load_state(self.optimizer, state["state"])
        for number, name, values in state["moved"]:
            group = self.optimizer.param_groups[number]
            group[name] = like(group.get(name, tuple(values) if len(values) > 1 else 0.0), iter(values))
            self._moved.add((number, name))
        self._state = self.optimizer.state
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

    def check_state_is_kept(self) -> None:
        """Raise ValueError if the script has given the optimizer a state, and it is a server's that steps."""
        if self.optimizer.state is not self._state:
            raise ValueError(
                "the optimizer's state was loaded after attach(), and the server steps with the state that "
                "it had then; call optimizer.load_state_dict() before attach()"
            )

    def _numbers(self) -> dict[tuple[int, str], list[float]]:
        """The numbers in its groups, but for learning rates, which are the scheduler's; torch's move none."""
        if type(self.optimizer).__module__.startswith("torch.optim"):
            return {}
        return {
            (number, name): flat_numbers(value)
            for number, group in enumerate(self.optimizer.param_groups)
            for name, value in group.items()
            if name not in ("params", "lr") and is_numeric(value)
        }

    def check_still_holds(self) -> None:
        """Raise ValueError if the script has changed what it trains, which the other nodes cannot know."""
        if any(p.requires_grad for p in self._frozen):
            raise ValueError(
                "a parameter of the optimizer that was frozen at attach() is trainable now. Let it be "
                "trainable at attach()."
            )
        if (now := [id(p) for p in held_by(self.optimizer)]) != self._held:
            raise ValueError(
                f"the optimizer held {len(self._held)} parameters at attach(), and holds {len(now)} now, or "
                "others. Give it all its parameters before attach()."
            )
