"""The user's own training loop as a replica: `optimizer.step()` hands the gradient over."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import Diverged
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Gradient
from shoal.core.vector import Flat, Layout
from shoal.engine.streaming import Intake, Streamed
from shoal.replicas.module import reset_momentum
from shoal.replicas.optimizer import Schedule, needs_closure
from shoal.replicas.served import ServedReplica
from shoal.replicas.watch import Watch

LOOK_SECONDS = 1.0
"""Seconds between two checks that the gradient is finite. A check reads the whole gradient."""


class AttachedReplica:
    """A replica whose gradients come from the user's own `loss.backward()`.

    The parameters that the optimizer holds are trained, and no others. Raises ValueError if it holds none of
    the model's, or some that are not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        held = _held(optimizer)
        _check_are_of(model, held)
        self._flat = Flat(model, {id(p) for p in held})
        self._held = [id(p) for p in held]
        self._frozen = [p for p in held if not p.requires_grad]
        self._optimizer = optimizer
        self.x = self._flat.x
        self.samples = 0  # since the last step; 0 if the loop does not report them, and then counted as 1
        self.batches = 0  # batches that shard() has handed out
        self.loss: float | None = None
        self.own_loss: Any = None  # what the optimizer's own evaluation of a closure returned
        self.original_step: Callable[..., Any] = optimizer.step
        self._closure: tuple[Callable[[], Any], ...] = ()  # for an optimizer that evaluates it itself
        self._schedule = Schedule(optimizer)
        self._watch = Watch(self._flat)
        self._g: Tensor | None = None
        self._untouched = -1  # the version of `_g` while it is the gradient that the loop left
        self._is_scaled = False
        self._overflowed = False
        self._next_look = 0.0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that are trained, in the order in which they lie in `x`."""
        return self._flat.parameters

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that back-propagation has left."""
        return [p.grad for p in self._flat.parameters if p.grad is not None]

    @property
    def layout(self) -> Layout:
        """Which slice of `x` is which parameter."""
        return self._flat.layout

    @property
    def lr(self) -> float:
        """The current learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def changed(self) -> Tensor | None:
        """The numbers in the optimizer's groups, if others than the first rate have changed; else None."""
        return self._schedule.changed()

    def served(self, me: NodeIdentity) -> ServedReplica:
        """The replica of a server of this model: its slice, and a copy of the optimizer."""
        return ServedReplica(me, self._flat, self._optimizer)

    @property
    def parts(self) -> Sequence[slice]:
        """The slices in which `stream` hands a gradient over."""
        return self._watch.parts

    async def gradient(self) -> Gradient:
        """Wait for the user to call `optimizer.step()`, and return the gradient."""
        await _until_step_is_called()
        return self.collect()

    def collect(self) -> Gradient:
        """The gradient that the user's loop has left, now that it calls `optimizer.step()`."""
        self._check_still_trained()
        if self._g is None:
            self._g = torch.empty_like(self.x)
        g = self._flat.gradient(self._g)
        scale, count = self._undo_scaling(), self._count()
        self._untouched = g._version if scale is None and count else -1
        if scale is not None:
            g.div_(scale)
        return Gradient(g if count else g.zero_(), count, self.loss)

    async def stream(self, intake: Intake) -> Streamed:
        """As `gradient`, but hand the gradient over in parts while the user's back-propagation runs."""
        self._watch.begin(intake, lambda: intake.unit * (self.samples or 1))
        await _until_step_is_called()
        self._check_still_trained()
        scale, count = self._undo_scaling(), self._count()
        weight = intake.unit * count
        if scale is not None:  # each worker has its own scale
            weight /= float(scale)
        # GradScaler changes gradients in a way that the watch cannot detect
        changed = self._watch.end(weight, trusted=not self._is_scaled)
        return Streamed(intake.out, count, self.loss, changed, partial(self._watch.fill, intake.out, weight))

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """The loss of a closure, and its gradients; None for an optimizer that evaluates it itself."""
        if needs_closure(self._optimizer):
            self._closure = (closure,)
            return None
        with torch.enable_grad():
            loss = closure()
        self.loss = float(torch.as_tensor(loss).detach())
        return loss

    def _count(self) -> int:
        """The samples of the gradient; 0 if mixed precision overflowed, so that only other workers count."""
        samples, self.samples = self.samples or 1, 0
        if self._overflowed:
            return 0
        self._check_finite()
        return samples

    def seek(self, owner: int, place: int) -> None:
        """Raise TypeError: the loop owns the data, so no other worker can take its batches."""
        raise TypeError("batches of your own loop cannot be handed to another worker")

    def _check_still_trained(self) -> None:
        """Raise ValueError if the script has changed what is trained, which the other nodes cannot know."""
        self._flat.check_still_bound()
        if any(p.requires_grad for p in self._frozen):
            raise ValueError(
                "a parameter of the optimizer that was frozen at attach() is trainable now. Let it be "
                "trainable at attach()."
            )
        if (now := [id(p) for p in _held(self._optimizer)]) != self._held:
            raise ValueError(
                f"the optimizer held {len(self._held)} parameters at attach(), and holds {len(now)} now, or "
                "others. Give it all its parameters before attach()."
            )

    def _undo_scaling(self) -> Tensor | None:
        """Return the factor of GradScaler, if one is in use, and note whether it found an overflow."""
        optimizer: Any = self._optimizer
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._is_scaled = overflow is not None
        self._overflowed = self._is_scaled and bool(overflow)
        if overflow is not None:
            optimizer.grad_scale = optimizer.found_inf = None  # done: the original step must ignore them
        return scale

    def _check_finite(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if not all(bool(torch.isfinite(g.sum(dtype=_wide(g)))) for g in self.gradients):
            raise Diverged(
                f"the gradient is not finite any more. Try a smaller learning rate (it is {self.lr:g}), "
                "gradient clipping, or look for inputs that are not finite."
            )

    def descend(self, g: Tensor) -> None:
        """Run the user's own optimizer step, unless mixed precision overflowed at every worker."""
        if self._overflowed and not g.any():
            return
        if (
            g is not self._g or g._version != self._untouched
        ):  # else a parameter may have none, or a sparse one
            self._flat.set_gradient(g)
        self.own_loss = self.original_step(*self._closure)

    def release(self) -> None:
        """Remove the hooks from the model."""
        self._watch.close()

    def reset_momentum(self) -> None:
        """Zero the velocity of SGD with momentum."""
        reset_momentum(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizer and of torch's global generator, and the number of batches taken."""
        noise = torch.get_rng_state()
        return {"optimizer": self._optimizer.state_dict(), "noise": noise, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, except for learning rates: those are set by the user's scheduler."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        torch.set_rng_state(state["noise"])
        self.batches = state["batches"]


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_are_of(model: nn.Module, held: Sequence[Tensor]) -> None:
    ours, trained = {id(p) for p in model.parameters()}, {id(p) for p in held if p.requires_grad}
    if not ours & trained:
        raise ValueError(
            "the optimizer holds none of the model's trainable parameters; build it from model.parameters()"
        )
    if trained - ours:
        raise ValueError(
            f"the optimizer also holds {len(trained - ours)} parameters that are not the model's: they "
            "would differ between workers. Attach one module that contains all trained parameters."
        )


def _wide(g: Tensor) -> torch.dtype:
    """The dtype in which to sum a gradient: at least single precision."""
    return torch.promote_types(g.dtype, torch.float32)


@types.coroutine
def _until_step_is_called() -> Generator[None, None, None]:
    yield
