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
from shoal.core.replica import NOISE, Gradient, LastDeal, NoMoreSteps
from shoal.core.vector import Flat, Layout
from shoal.engine.streaming import Intake, Streamed
from shoal.replicas.local_shards import LocalShards, Replicated, local
from shoal.replicas.module import reset_momentum
from shoal.replicas.optimizer import (
    check_are_of,
    describe_options,
    held_by,
    needs_closure,
)
from shoal.replicas.outside_changes import OutsideChanges
from shoal.replicas.passes import Passes
from shoal.replicas.served import ServedReplica
from shoal.replicas.stepper import Stepper
from shoal.replicas.watch import Watch

LOOK_SECONDS = 1.0
"""Seconds between two checks that the gradient is finite. A check reads the whole gradient."""


class AttachedReplica:
    """A replica whose gradients come from the user's own `loss.backward()`.

    The parameters that the optimizers hold are trained, and no others. Each of several optimizers is stepped
    at its own times: a gradient is of one of them, and zero elsewhere. Raises ValueError if they hold none of
    the model's parameters, or some that are not the model's.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        held = [p for optimizer in optimizers for p in held_by(optimizer)]
        check_are_of(model, held)
        self._shards = LocalShards(model, held)
        self._flat = Flat(model, {id(p) for p in held}, self._shards.by_id)
        self._replicated = Replicated(self._flat.parameters, self._flat.tensors)
        self._steppers = [Stepper(optimizer, self._flat) for optimizer in optimizers]
        self._now = self._steppers[0]  # that is being stepped
        self.x = self._flat.x
        self.passes = Passes()  # over the training data, that shard() deals out
        self.is_idle = False  # whether the step at hand is without a batch, in which other workers have one
        self._model = model
        self.in_group = False  # whether this process is a part of a worker
        self.others_need_averages = False  # for a while after the step: workers come and go
        self._gradients_at = 0  # where the first gradient of the last average lies, or 0
        self._reuses_gradients = False  # the loop writes its next gradients there
        self.tells_servers = True  # of changes in the optimizer's groups: theirs takes the steps
        self.outside_changes: OutsideChanges | None = None  # None: the strategy keeps them
        self._has_ended = False  # the loop, while those of other workers may go on
        self.loss: float | None = None
        self.own_loss: Any = None  # what the optimizer's own evaluation of a closure returned
        self._watch = Watch(self._flat, early=len(optimizers) == 1 and not self.is_sharded)
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
    def stepped_parameters(self) -> list[nn.Parameter]:
        """Those of the optimizer that is being stepped."""
        return [p for n, p in enumerate(self._flat.parameters) if n in self._now.indices]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that back-propagation has left, of the optimizer that is being stepped."""
        return [local(p.grad) for p in self.stepped_parameters if p.grad is not None]

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a shard of some parameter."""
        return bool(self._shards.by_id)

    @property
    def untrained(self) -> list[Tensor]:
        """The model's other parameters, which are not trained, and its buffers; of DTensors local shards."""
        known = {id(p) for p in self._flat.parameters}
        frozen = (local(p).detach() for p in self._model.parameters() if id(p) not in known)
        return [*frozen, *map(local, self._model.buffers())]

    def enter(self) -> None:
        """The loop hands over: take in what it has left in shards, which are no views on `x`."""
        self._shards.read()

    def leave(self) -> None:
        """The loop goes on: give it the shards as they are now."""
        self._shards.write()
        if self.outside_changes is not None:
            self.outside_changes.begin()

    def agree(self) -> None:
        """Have all processes of a group go on with the same values of what several of them hold."""
        self._replicated.agree()
        self._shards.write()
        if self.in_group and self.outside_changes is not None:
            self.outside_changes.begin()

    @property
    def without_gradient(self) -> str | None:
        """The name of a parameter of that optimizer which has no gradient though it is trained, or None."""
        named = zip(self._flat.parameters, self._flat.layout.names, strict=True)
        missing = ((n, name) for n, (p, name) in enumerate(named) if p.grad is None and p.requires_grad)
        return next((name for n, name in missing if n in self._now.indices), None)

    def turn_to(self, number: int) -> None:
        """The loop is about to step this one of the optimizers."""
        self._now = self._steppers[number]
        if len(self._steppers) > 1:
            self._flat.active = self._now.indices

    def saw(self, samples: int) -> None:
        """Each optimizer's next step is on so many samples more."""
        for stepper in self._steppers:
            stepper.samples += samples

    @property
    def pending_samples(self) -> int:
        """Samples of the first optimizer's next step, as far as the loop has reported them."""
        return self._steppers[0].samples

    @property
    def layout(self) -> Layout:
        """Which slice of `x` is which parameter."""
        return self._flat.layout

    @property
    def lr(self) -> float:
        """The current learning rate of the first parameter group."""
        rate = self._now.optimizer.param_groups[0].get("lr")
        return float("nan") if rate is None else float(rate)

    @property
    def changed(self) -> Tensor | None:
        """The numbers in the optimizer's groups, if others than the first rate have changed; else None.

        Of several optimizers: which is being stepped, and all its numbers.
        """
        if not self.tells_servers:
            return None
        self._now.check_state_is_kept()
        changed = self._now.schedule.changed()
        if len(self._steppers) == 1:
            return changed
        which = torch.tensor([self._steppers.index(self._now)], dtype=torch.float64)
        return torch.cat([which, self._now.schedule.numbers()])

    def served(self, me: NodeIdentity) -> ServedReplica:
        """The replica of a server of this model: its slice, and copies of the optimizers."""
        return ServedReplica(me, self._flat, *(stepper.optimizer for stepper in self._steppers))

    @property
    def options(self) -> list[str]:
        """The options of all optimizers, described."""
        return [line for stepper in self._steppers for line in describe_options(stepper.optimizer)]

    @property
    def groups(self) -> dict[int, int]:
        """The number of each parameter's group, by its id, counted through all optimizers."""
        groups = (group for stepper in self._steppers for group in stepper.optimizer.param_groups)
        return {id(p): number for number, group in enumerate(groups) for p in group["params"]}

    @property
    def parts(self) -> Sequence[slice]:
        """The slices in which `stream` hands a gradient over."""
        return self._watch.parts

    async def gradient(self) -> Gradient:
        """Wait for the user to call `optimizer.step()`, and return the gradient."""
        await self._step_called()
        return self.collect()

    def collect(self) -> Gradient:
        """The gradient that the user's loop has left, now that it calls `optimizer.step()`."""
        self._check_still_trained()
        self._shards.read_gradients()
        if self._g is None:
            self._g = torch.empty_like(self.x)
        g = self._flat.gradient(self._g)
        scale, count = self._undo_scaling(), self._count()
        self._untouched = g._version if scale is None and count else -1
        if scale is not None:
            g.div_(scale)
        return Gradient(g if count else g.zero_(), count, self.loss)

    async def step(self, check: Callable[[float | None], None]) -> int:
        """Wait for the user to call `optimizer.step()`, and take that step on the gradients as they lie."""
        await self._step_called()
        self._check_still_trained()
        scale, count = self._undo_scaling(), self._count()
        if scale is not None:
            for g in self.gradients:
                g.div_(scale)
        check(self.loss)
        if count:
            self._take_step()
        return count

    async def stream(self, intake: Intake) -> Streamed:
        """As `gradient`, but hand the gradient over in parts while the user's back-propagation runs."""
        self._watch.begin(intake, lambda: intake.unit * (self._now.samples or 1))
        await self._step_called()
        self._check_still_trained()
        self._shards.read_gradients()
        scale, count = self._undo_scaling(), self._count()
        weight = intake.unit * count
        if scale is not None:  # each worker has its own scale
            weight /= float(scale)
        # GradScaler changes gradients in a way that the watch cannot detect
        changed = self._watch.end(weight, trusted=not self._is_scaled)
        return Streamed(intake.out, count, self.loss, changed, partial(self._watch.fill, intake.out, weight))

    async def _step_called(self) -> None:
        try:
            await _until_step_is_called()
        except NoMoreSteps:
            self._has_ended = True
            raise

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """The loss of a closure, and its gradients; None for an optimizer that evaluates it itself."""
        if needs_closure(self._now.optimizer):
            self._now.closure = (closure,)
            return None
        with torch.enable_grad():
            loss = closure()
        self.loss = None if loss is None else float(torch.as_tensor(loss).detach())
        return loss

    def _count(self) -> int:
        """The samples of the gradient; 0 if mixed precision overflowed, so that only other workers count."""
        samples, self._now.samples = self._now.samples or 1, 0
        if self._overflowed or self.is_idle:
            return 0
        self._check_finite()
        return samples

    def seek(self, owner: int, place: int) -> None:
        """Raise TypeError: the loop owns the data, so no other worker can take its batches."""
        raise TypeError("batches of your own loop cannot be handed to another worker")

    def _check_still_trained(self) -> None:
        """Raise ValueError if the script has changed what is trained, which the other nodes cannot know."""
        self._flat.check_still_bound()
        if self.outside_changes is not None:
            self.outside_changes.check()
        self._now.check_still_holds()

    def _undo_scaling(self) -> Tensor | None:
        """Return the factor of GradScaler, if one is in use, and note whether it found an overflow."""
        optimizer: Any = self._now.optimizer
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._is_scaled = overflow is not None
        self._overflowed = self._is_scaled and bool(overflow)
        if overflow is not None and self.in_group:
            raise ValueError(
                "GradScaler looks for overflow in each process, and the processes of a group must skip the "
                "same steps; take bfloat16, which needs no scaling"
            )
        if overflow is not None:
            optimizer.grad_scale = optimizer.found_inf = None  # done: the original step must ignore them
        return scale

    def _check_finite(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        sums = [g.sum(dtype=_wide(g)).to(self.x.device) for g in self.gradients]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            raise Diverged(
                f"the gradient is not finite any more. Try a smaller learning rate (it is {self.lr:g}), "
                "gradient clipping, or look for inputs that are not finite."
            )

    def descend(self, g: Tensor) -> None:
        """Run the user's own optimizer step, unless mixed precision overflowed at every worker."""
        if (self._overflowed or self.is_idle) and not g.any():
            return
        if g is not self._g or g._version != self._untouched:
            if self._has_ended and len(self._steppers) > 1:
                self._follow_others(g)
            self._check_alone(g)
            self._flat.set_gradient(self._apart(g))  # else it is the loop's own, where some may have none
            self._shards.write_gradients()
        self._take_step()

    def _apart(self, average: Tensor) -> Tensor:
        """What the loop sees as its gradients: a copy if it would write to what others may need."""
        first = self._flat.tensors[0].grad
        here = 0 if first is None or first.is_sparse else first.data_ptr()
        self._reuses_gradients = self._reuses_gradients or (here != 0 and here == self._gradients_at)
        if self.others_need_averages and (self._reuses_gradients or not self._gradients_at):
            average = average.clone()
        self._gradients_at = self._flat.views(average)[0].data_ptr()
        return average

    def _take_step(self) -> None:
        self._shards.write()
        self.own_loss = self._now.take()
        self._flat.take_in()
        self._shards.read()

    def _follow_others(self, g: Tensor) -> None:
        """This loop has ended, and the others step one of the optimizers: turn to that one."""
        views = self._flat.views(g)
        for number, stepper in enumerate(self._steppers):
            if any(bool(views[n].any()) for n in stepper.indices):
                self.turn_to(number)
                return

    def _check_alone(self, g: Tensor) -> None:
        """Raise ValueError if another worker has stepped another optimizer."""
        for n, view in enumerate(self._flat.views(g)) if self._flat.active is not None else ():
            if not self._flat.is_active(n) and view.any():
                raise ValueError(
                    "workers stepped different optimizers at the same time. This strategy averages "
                    "gradients: all workers must step the same optimizers in the same order."
                )

    def release(self) -> None:
        """Remove the hooks from the model."""
        self._watch.close()

    def reset_momentum(self) -> None:
        """Zero the velocity of SGD with momentum."""
        for stepper in self._steppers:
            reset_momentum(stepper.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers and of torch's global generator, and the place in the data."""
        states = [stepper.state() for stepper in self._steppers]
        return {"optimizers": states, NOISE: torch.get_rng_state(), "passes": self.passes.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, except for learning rates: those are set by the user's scheduler."""
        for stepper, own in zip(self._steppers, state["optimizers"], strict=True):
            stepper.load(own)
        if NOISE in state:
            torch.set_rng_state(state[NOISE])
        self.passes.load(state["passes"])

    # -- workers that come and go --------------------------------------------------------------

    def redeal(self, place: int, workers: int, step: int, last: LastDeal) -> None:
        """From `step` on deal the training data to so many workers, of whom this is number `place`."""
        self.passes.redeal(place, workers, last.undone)

    @property
    def place_in_data(self) -> str:
        """Where the loop is in its training data, in words."""
        return str(self.passes)

    def end_of(self, passes: int) -> int:
        """Raise TypeError: the loop alone knows its end."""
        raise TypeError("the end of your own loop is not known beforehand")

    def deal(self) -> None:
        """Nothing: the place in the data is a part of the state, as the loop must find it again."""
        return

    def take_deal(self, deal: dict[str, Any] | None) -> None:
        """Nothing: see `deal`."""


def _wide(g: Tensor) -> torch.dtype:
    """The dtype in which to sum a gradient: at least single precision."""
    return torch.promote_types(g.dtype, torch.float32)


@types.coroutine
def _until_step_is_called() -> Generator[None, None, None]:
    yield
