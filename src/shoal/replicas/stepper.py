"""Stepper: one of the optimizers of the user's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.core.vector import Flat
from shoal.replicas.optimizer import Schedule, held_by


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
        self._held = [id(p) for p in held]
        self._frozen = [p for p in held if not p.requires_grad]

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
